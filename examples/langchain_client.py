"""LangChain's OpenAI client, as it is, with a server of Paceline.

Start `paceline serve smollm2-135m`, `pip install langchain-openai`, then `python examples/langchain_client.py`.
"""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"

chat = ChatOpenAI(base_url=BASE_URL, api_key="none", model=MODEL, temperature=0, max_tokens=32)
print("answer:", chat.invoke("Name a fruit.").content)
print("streamed: ", end="")
for piece in chat.stream("Name a city."):
    print(piece.content, end="", flush=True)
print()
