"""Retrieval with LangChain: it finds the passages that fit a question best, and the model answers from them.

    pip install langchain-openai
    quire up --model models/demo
    python examples/retrieval.py http://127.0.0.1:8000/v1

Passages are ranked by the words that they share with the question, because the gateway has no embeddings. A vector
store can replace `retrieve`. Passages come first in the prompt, in a fixed order, so that questions about the same
passages share a prefix in the cache.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Final

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

PASSAGES: Final = (
    "The for statement is used to iterate over the elements of a sequence.",
    "The import statement finds a module, and binds a name to it.",
    "The return statement leaves the current function call.",
    "The while statement is used for repeated execution.",
)
PROMPT: Final = ChatPromptTemplate.from_messages(
    [("system", "Answer from these passages:\n{passages}"), ("human", "{question}")]
)


def retrieve(passages: Sequence[str], question: str, count: int = 2) -> list[Document]:
    """Returns the passages that share the most words with a question, in their original order."""
    words = set(re.findall(r"\w+", question.lower()))
    shared = [len(words & set(re.findall(r"\w+", passage.lower()))) for passage in passages]
    best = sorted(range(len(passages)), key=lambda number: -shared[number])[:count]
    return [Document(passages[number], metadata={"passage": number}) for number in sorted(best)]


def answer(address: str, question: str) -> tuple[str, list[Document]]:
    """Returns the answer to a question, and the passages that it is based on."""
    model = OpenAI(base_url=address, api_key="none").models.list().data[0].id
    found = retrieve(PASSAGES, question)
    chat = ChatOpenAI(model=model, base_url=address, api_key=lambda: "none", temperature=0, max_completion_tokens=64)
    passages = "\n".join(document.page_content for document in found)
    return str((PROMPT | chat).invoke({"passages": passages, "question": question}).content), found


if __name__ == "__main__":
    said, sources = answer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", "What does import do?")
    for source in sources:
        print(f"[{source.metadata['passage']}] {source.page_content}")
    print(said)
