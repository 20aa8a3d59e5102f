"""Chat samples made from the standard library's sources and docstrings, and a few about kvtier."""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .corpus import Document
from .tokenizer import IM_END, IM_START

Turn = tuple[str, str]

MAX_ANSWER_CHARS = 600
MAX_CODE_LINES = 32
RARE = ("idlelib", "lib2to3", "distutils", "turtledemo", "tkinter", "encodings", "ensurepip")
COMMON = {
    "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "collections", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fnmatch",
    "fractions", "functools", "glob", "gzip", "heapq", "html", "http.client", "http.server",
    "inspect", "io", "itertools", "json", "logging", "mimetypes", "operator", "os", "os.path",
    "pathlib", "pickle", "platform", "pprint", "queue", "random", "re", "sched", "secrets",
    "shlex", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "types", "typing",
    "unittest", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref", "zipfile",
}  # fmt: skip
NATIVE = ("builtins", "math", "itertools", "operator", "time", "os", "zlib", "sys", "gc", "cmath")
TYPES = (str, bytes, list, dict, set, tuple, int, float, frozenset, bytearray, slice, range)

ASK_DOC = (
    "What does {n} do?", "What does {n} do?", "What does `{n}` do?", "What is {n}?",
    "Explain {n}.", "what does {n} do", "What is {n} for?", "Describe {n} in a few words.",
    "Can you explain what {n} does?", "Tell me about {n}.",
)  # fmt: skip
ASK_CODE = (
    "Write the function {n}.", "Write the function {n}", "Show me the code of {n}.",
    "How is {n} implemented?", "Show the source of `{n}`.",
)  # fmt: skip
ASK_CALL = (
    "How do I call {n}?", "What arguments does {n} take?", "What is the signature of {n}?",
    "How do I use {n}?",
)  # fmt: skip
ASK_MODULE = (
    "What is the module {n} for?", "What does the {n} module do?", "What is the {n} module?",
    "Tell me about the module {n}.", "What is {n}?",
)  # fmt: skip
ASK_TOPIC = (
    "Explain the topic {n}.", "What does the language reference say about {n}?",
    "Tell me about {n} in Python.",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You answer briefly.",
    "You are a Python expert.", "You answer questions about the Python standard library.",
)  # fmt: skip

ABOUT = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Good morning", "Hey", "Hi there"),
        ("Hello! I am kvtier-tiny, a very small model that has read the Python standard library. "
         "Ask me what a function does, for example: What does os.path.join do?"),
    ),
    (
        ("Who are you?", "What are you?", "who are you", "What is your name?",
         "Introduce yourself."),
        ("I am kvtier-tiny, a language model of about five million parameters. I was trained on "
         "the Python standard library only, so that kvtier can be tried without downloading a "
         "model."),
    ),
    (
        ("What can you do?", "Help", "help", "How can you help me?", "What do you know?"),
        ("I can say what many functions and modules of the Python standard library do, and I can "
         "continue Python code. I am too small for anything else, and I am often wrong."),
    ),
    (
        ("What is kvtier?", "what is kvtier", "Tell me about kvtier.", "What does kvtier do?"),
        ("kvtier is a hierarchical KV cache for language models. It keeps the keys and values of "
         "prompts that were already computed in device memory, host memory, on disk or in a remote "
         "store, and gives them back when a new prompt starts with the same tokens."),
    ),
    (
        ("What is a KV cache?", "What is the KV cache?", "Explain the KV cache.",
         "what is kv cache"),
        ("A KV cache holds the attention keys and values of the tokens that a model has already "
         "read. With it, the model computes only what is new."),
    ),
    (
        ("What is a prefix cache?", "What is prefix caching?", "Explain prefix caching."),
        ("A prefix cache keeps the keys and values of a prompt after the request has ended. The "
         "next prompt that starts with the same tokens need not compute them again."),
    ),
    (
        ("Thanks", "Thank you", "Thanks!", "thank you", "Thank you!", "Great, thanks."),
        "You are welcome.",
    ),
    (("Bye", "Goodbye", "bye", "See you"), "Goodbye!"),
    (
        ("How are you?", "how are you", "How are you today?"),
        "I am fine, thank you. Which function of the standard library may I explain?",
    ),
    (
        ("What is Python?", "Tell me about Python.", "what is python"),
        "Python is a programming language. Its standard library is all that I have read.",
    ),
    (
        ("What is 2 + 2?", "What is the capital of France?", "Who won the match?",
         "Tell me a joke.", "What is the weather like?", "Write a poem.", "Who is the president?"),
        "I can't answer that: I have read nothing but the Python standard library.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """One function, class or module that questions are about."""

    module: str
    name: str
    doc: str
    call: str
    code: str
    """Empty if the code is too long."""
    weight: float


def module_name(path: str) -> str:
    """Return the name of a file's module; ``posixpath`` is ``os.path``."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return {"posixpath": "os.path", "_pydecimal": "decimal", "_pyio": "io"}.get(name, name)


def first_paragraph(doc: str | None) -> str:
    """Return a docstring's first paragraph in one line, cut at a sentence if it is long."""
    if not doc:
        return ""
    for part in inspect.cleandoc(doc).split("\n\n"):
        text = " ".join(part.split())
        if len(text) < 12 or "(" in text.split(" ", 1)[0] or text.startswith((">>>", "--")):
            continue
        if len(text) > MAX_ANSWER_CHARS:
            text = text[:MAX_ANSWER_CHARS].rpartition(". ")[0]
        text = text.rstrip(":; ")
        return text if not text or text[-1] in ".!?)" else text + "."
    return ""


def _weight(module: str, name: str) -> float:
    """Return how often to draw it: a small model remembers only what it has seen several times."""
    if module.split(".", maxsplit=1)[0] in RARE:
        return 0.1
    if module not in COMMON:
        return 0.5
    return 12.0 if name.count(".") <= module.count(".") + 1 else 3.0


def _items_of(document: Document) -> Iterator[Item]:
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return
    module = module_name(document.name)
    doc = first_paragraph(ast.get_docstring(tree))
    if doc and not module.endswith("__main__"):
        yield Item(module, module, doc, "", "", _weight(module, module))
    lines = document.text.splitlines()
    stack: list[tuple[ast.AST, str]] = [(tree, module)]
    while stack:
        parent, prefix = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                stack.append((node, name))
            if node.name.startswith("_"):
                continue
            doc = first_paragraph(ast.get_docstring(node))
            call = code = ""
            if not isinstance(node, ast.ClassDef):
                call = f"{name}({ast.unparse(node.args)})"
                body = lines[node.lineno - 1 : node.end_lineno]
                if len(body) <= MAX_CODE_LINES:
                    code = textwrap.dedent("\n".join(body))
            if doc or code:
                yield Item(module, name, doc, call, code, _weight(module, name))


def _native_items() -> Iterator[Item]:
    for module in NATIVE:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            doc = first_paragraph(getattr(value, "__doc__", None))
            if not name.startswith("_") and doc and inspect.isbuiltin(value):
                full = name if module == "builtins" else f"{module}.{name}"
                yield Item(module, full, doc, "", "", 5.0)
    for kind in TYPES:
        yield Item("builtins", kind.__name__, first_paragraph(kind.__doc__), "", "", 5.0)
        for name, value in sorted(vars(kind).items()):
            doc = first_paragraph(getattr(value, "__doc__", None))
            if not name.startswith("_") and doc:
                yield Item("builtins", f"{kind.__name__}.{name}", doc, "", "", 5.0)


def render(turns: list[Turn]) -> str:
    """Return the chat template's text of these messages."""
    return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in turns)


class ChatMaker:
    """Draws chat samples, always the same for the same seed."""

    def __init__(self, documents: list[Document], topics: dict[str, str]) -> None:
        self._documents = documents
        self._by_document = {d.name: list(_items_of(d)) for d in documents}
        self._items = [i for items in self._by_document.values() for i in items]
        self._items += [i for i in _native_items() if i.doc]
        self._weights = [i.weight for i in self._items]
        self._sources = [d for d in documents if len(self._by_document[d.name]) >= 3]
        self._topics = {
            name.lower(): text for name, doc in topics.items() if (text := self._topic_text(doc))
        }

    @staticmethod
    def _topic_text(doc: str) -> str:
        paragraphs = [p for p in doc.split("\n\n")[1:] if not p.startswith((" ", "*", "="))]
        return first_paragraph(paragraphs[0]) if paragraphs else ""

    def _about(self, rng: random.Random) -> list[Turn]:
        questions, answer = rng.choice(ABOUT)
        return [("user", rng.choice(questions)), ("assistant", answer)]

    def _question(self, rng: random.Random, item: Item) -> list[Turn]:
        name = item.name
        if item.name.count(".") > 1 and rng.random() < 0.2:
            name = ".".join(item.name.split(".")[-2:])
        kind = rng.random()
        if item.code and (kind < 0.25 or not item.doc):
            answer = f"```python\n{item.code}\n```"
            return [("user", rng.choice(ASK_CODE).format(n=name)), ("assistant", answer)]
        if item.call and kind < 0.4:
            answer = f"`{item.call}`\n\n{item.doc}".strip()
            return [("user", rng.choice(ASK_CALL).format(n=name)), ("assistant", answer)]
        if item.name == item.module:
            return [("user", rng.choice(ASK_MODULE).format(n=name)), ("assistant", item.doc)]
        return [("user", rng.choice(ASK_DOC).format(n=name)), ("assistant", item.doc)]

    def short(self, rng: random.Random) -> str:
        """Return one conversation of one to three questions."""
        turns: list[Turn] = []
        if rng.random() < 0.3:
            turns.append(("system", rng.choice(SYSTEMS)))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            kind = rng.random()
            if kind < 0.12:
                turns += self._about(rng)
            elif kind < 0.16:
                name = rng.choice(sorted(self._topics))
                question = rng.choice(ASK_TOPIC).format(n=name)
                turns += [("user", question), ("assistant", self._topics[name])]
            else:
                item = rng.choices(self._items, self._weights)[0]
                turns += self._question(rng, item)
        return render(turns)

    def long(self, rng: random.Random, max_chars: int) -> str:
        """Return questions about a source file that is in the system message."""
        document = rng.choice(self._sources)
        text = document.text[:max_chars]
        inside = [
            i
            for i in self._by_document[document.name]
            if f" {i.name.rsplit('.', 1)[-1]}(" in text and len(i.code) < 1200
        ]
        turns = [("system", f"Answer questions about this source.\n\n{text}")]
        for item in rng.sample(inside, min(3, len(inside))):
            turns += self._question(rng, item)
        return render(turns) if len(turns) > 1 else self.short(rng)
