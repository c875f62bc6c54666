"""The requests that the server reads: OpenAI's field names, vLLM's where OpenAI has none, and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_PROMPTS = 256  # of one completions request
MAX_CHOICES = 1024  # of one request, those of all prompts together
MAX_STOPS = 32

Text = Annotated[str, Field(max_length=1 << 22)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class Strict(BaseModel):
    """A JSON object with these fields and no others; numbers are finite, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False  # a last chunk with the usage of the whole request
    include_obfuscation: bool | None = None  # harmless: nothing is padded


class JsonSchemaFormat(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # harmless: a schema always holds


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionDefinition(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # harmless: where a call is constrained, its schema always holds


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class Prediction(Strict):
    type: Literal["content"]
    content: Text | list[dict[str, Any]]


class FunctionCall(Strict):
    name: str
    arguments: str  # JSON


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # harmless: of a streamed call that is sent back as it came


class Message(Strict):
    """One message of a conversation. The fields after `tool_call_id` are those of answers that are sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[dict[str, Any]] | None = None  # parts of the type text
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class Generation(Strict):
    """What chat and text completions have in common. null stands for the default, as OpenAI's clients send it."""

    model: str | None = None

    temperature: float | None = None  # 1, as OpenAI has it
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1 keep all
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None  # a JSON schema, or its text
    guided_regex: str | None = None
    guided_grammar: str | None = None  # in Lark's notation
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None

    speculative: bool | dict[str, Any] | None = None  # false = decode plainly
    metrics: Literal["none", "summary", "detailed"] | None = None
    priority: int | None = None  # lower comes first, 0 unless given

    # Harmless: read by nobody, and listed in docs/serving.md
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # harmless: a model calls what it calls, a grammar one tool
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the model's template, such as enable_thinking


class CompletionRequest(Generation):
    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True  # of a prompt; a chat template writes its own
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
