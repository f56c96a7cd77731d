"""The chat template: plain lines, because the models are trained on text and not on chats.

    System: Answer in one sentence.
    User: What is a scan?
    Assistant:

Every message is a line that begins with its role. The model continues after `Assistant:`, and its answer ends where it
begins another role's line.
"""

from collections.abc import Sequence

from logdepth.serve.requests import Message

ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
STOPS = tuple(f"{space}{role}:" for role in ("User", "System", "Assistant") for space in ("\n", " "))
"""What ends an answer. Tokenizers that are not lossless turn line breaks into spaces."""


def chat_prompt(messages: Sequence[Message]) -> str:
    """The text before an answer."""
    lines = [f"{ROLES[message.role]}: {message.text}\n" for message in messages]
    return "".join([*lines, "Assistant:"])
