"""Pickles of plain data, read without pickle: dict, list, tuple, str, int, float, bool, None, and nothing else.

A pickle is a program that may import and call anything. What reads it here has no opcode that does so: it stops at the
first one. It also has no sets, no keys of dictionaries but scalars (a tuple's hash can take time exponential in the
pickle's length), and a memo that grows with what is in it (that of pickle.loads has as many places as an opcode says).
The opcodes: https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import struct
from typing import Any

BEGINNING = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
GET, LONG_GET, PUT, LONG_PUT, MEMOIZE = *b"hjqr", 0x94
SHORT_TEXT, TEXT, LONG_TEXT = 0x8C, ord("X"), 0x8D
MARK, ITEMS, ITEM, APPENDS, APPEND, TUPLE = b"(useat"
LIST, DICT, NOTHING, TRUE, FALSE = *b"]}N", 0x88, 0x89
EMPTY_TUPLE, TUPLE_1, TUPLE_2, TUPLE_3 = ord(")"), 0x85, 0x86, 0x87
UNSIGNED_1, UNSIGNED_2, SIGNED_4, FLOAT, INTEGER, FRAME, STOP = *b"KMJG", 0x8A, 0x95, ord(".")
ARGUMENT = {GET: 1, LONG_GET: 4, PUT: 1, LONG_PUT: 4, MEMOIZE: 0, SHORT_TEXT: 1, TEXT: 4, LONG_TEXT: 8}
ARGUMENT |= dict.fromkeys((MARK, ITEMS, ITEM, APPENDS, APPEND, TUPLE, LIST, DICT, NOTHING, TRUE, FALSE, STOP), 0)
ARGUMENT |= {EMPTY_TUPLE: 0, TUPLE_1: 0, TUPLE_2: 0, TUPLE_3: 0}
ARGUMENT |= {UNSIGNED_1: 1, UNSIGNED_2: 2, SIGNED_4: 4, FLOAT: 8, INTEGER: 1, FRAME: 8}
"""Bytes of the argument of every opcode that is known here."""
KEYS = {str, int, float, bool, type(None)}


class NotPlainError(Exception):
    """Why a pickle is not read, as a sentence without its subject."""


def plain(raw: bytes) -> Any:
    """The data of a pickle of protocol 2 to 5, in time and memory linear in its length. Raises NotPlainError."""
    if not raw.startswith(BEGINNING):
        raise NotPlainError("does not begin as a pickle of protocol 2 to 5")
    try:
        return _run(raw)
    except (IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
        raise NotPlainError("is cut off or damaged") from error


def _run(raw: bytes) -> Any:
    """The stack machine that a pickle is a program of. One loop: a call for each opcode makes it three times slower."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: dict[int, Any] = {}
    at, argument = 2, 0
    while True:
        code = raw[at]
        if (size := ARGUMENT.get(code)) is None:
            raise NotPlainError(f"holds more than plain data (opcode {bytes([code])!r} at byte {at})")
        at += 1
        if size:
            argument = int.from_bytes(raw[at : at + size], "little")  # cut off: the next opcode is missing too
            at += size
        if code in (GET, LONG_GET):
            stack.append(memo[argument])
        elif code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code in (SHORT_TEXT, TEXT, LONG_TEXT):
            stack.append(raw[at : at + argument].decode("utf-8", "surrogatepass"))
            at += argument
        elif code in (UNSIGNED_1, UNSIGNED_2):
            stack.append(argument)
        elif code == MARK:
            below.append(stack)
            stack = []
        elif code == DICT:
            stack.append({})
        elif code == ITEMS:
            items, stack = stack, below.pop()
            _set(stack[-1], items, at)
        elif code == INTEGER:
            stack.append(int.from_bytes(raw[at : at + argument], "little", signed=True))
            at += argument
        elif code == SIGNED_4:
            stack.append(argument - (argument >> 31 << 32))
        elif code == LIST:
            stack.append([])
        elif code == APPENDS:
            items, stack = stack, below.pop()
            _append(stack[-1], items, at)
        elif code == APPEND:
            value = stack.pop()
            _append(stack[-1], [value], at)
        elif code == ITEM:
            items = [stack.pop(-2), stack.pop()]
            _set(stack[-1], items, at)
        elif code in (NOTHING, TRUE, FALSE):
            stack.append(None if code == NOTHING else code == TRUE)
        elif code == FLOAT:
            stack.append(struct.unpack(">d", raw[at - 8 : at])[0])
        elif code in (PUT, LONG_PUT):
            memo[argument] = stack[-1]
        elif code == TUPLE:
            items, stack = stack, below.pop()
            stack.append(tuple(items))
        elif code == EMPTY_TUPLE:
            stack.append(())
        elif code in (TUPLE_1, TUPLE_2, TUPLE_3):
            items = [stack.pop() for _ in range(code - TUPLE_1 + 1)]
            stack.append(tuple(reversed(items)))
        elif code == STOP:
            return stack[-1]


def _append(to: Any, values: list[Any], at: int) -> None:
    if type(to) is not list:
        raise NotPlainError(f"appends to what is no list, before byte {at}")
    to.extend(values)


def _set(to: Any, items: list[Any], at: int) -> None:
    """`items`: key, value, key, value."""
    keys = items[::2]
    if type(to) is not dict or not KEYS.issuperset(map(type, keys)):
        raise NotPlainError(f"sets what is no dict, or a key that is no scalar, before byte {at}")
    to.update(zip(keys, items[1::2], strict=False))
