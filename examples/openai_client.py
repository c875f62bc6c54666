"""OpenAI's client, as it is, with a server of Paceline: a chat, a stream, a tool call, and what drafting brought.

Start `paceline serve smollm2-135m`, `pip install openai`, then `python examples/openai_client.py`.
"""

from __future__ import annotations

import sys

from openai import APIConnectionError, OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}

client = OpenAI(base_url=BASE_URL, api_key="none")  # the server's key, if it has one
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    sys.exit(f"no server answers at {BASE_URL}: start one with paceline serve smollm2-135m")
question = {"role": "user", "content": "What is the weather in Paris? Answer in one sentence."}
letter = "Dear Mrs Alvarez, the two missing screws were sent to you this morning."
order = {"role": "user", "content": f"Repeat word for word: {letter}"}

answer = client.chat.completions.create(
    model=model, messages=[order], max_tokens=48, temperature=0, extra_body={"metrics": "summary"}
)
print("answer:", answer.choices[0].message.content)
print("tokens a step:", answer.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"])

print("streamed: ", end="")
for chunk in client.chat.completions.create(model=model, messages=[order], max_tokens=48, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

forced = client.chat.completions.create(
    model=model, messages=[question], max_tokens=64, temperature=0, tools=[WEATHER], tool_choice="required"
)
call = forced.choices[0].message.tool_calls[0].function
print("tool call:", call.name, call.arguments)
