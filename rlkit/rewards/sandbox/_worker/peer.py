"""Two processes that call each other's functions over a socket. Values are copied; other objects become handles.

Values of the built-in types and of some of the standard library are copied. Any other object becomes a `Proxy` on the
other side. The operators of a proxy send its owner no plain value on purpose: a tested object that saw the value it is
compared with could claim to be equal to it.
"""

from __future__ import annotations

import builtins
import json
import operator
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from . import codec

_MAX_BYTES = 16 << 20
_ALONE = ("len", "iter", "next", "str", "repr", "float", "int", "bool", "abs")  # built-in functions of one object
_ITEMS = ("getitem", "setitem", "delitem")
_BETWEEN = ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")  # only with another object of the same side
_SPECIAL: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in _ALONE},
    **{name: getattr(operator, name) for name in ("neg", "eq", *_ITEMS, *_BETWEEN)},
    "isinstance": lambda a, b: isinstance(b, a),
    "enter": lambda a: a.__enter__(),
    "exit": lambda a: a.__exit__(None, None, None),
}


class Gone(BaseException):
    """The other process ended."""


class Remote(Exception):
    """An exception of the other side that is not built in."""


class Peer:
    """One end. `may(obj, attribute)` decides which attributes of this end's objects the other end may use."""

    def __init__(self, socket_fd: int, may: Callable[[Any, str], bool]) -> None:
        self._end = Connection(socket_fd)
        self._may = may
        self.mine: dict[int, Any] = {}
        self._exceptions: dict[int, type[BaseException]] = {}

    def ask(self, verb: str, target: int, *arguments: Any) -> Any:
        """Apply an operation to an object of the other side. Serve its requests in the meantime."""
        self.send([verb, target, [self.encode(a) for a in arguments]])
        while True:
            message = self.receive()
            if message[0] == "value":
                return self.decode(message[1])
            if message[0] == "raised":
                error = self._rebuilt(*message[1:])
                if isinstance(error, StopIteration | StopAsyncIteration) and verb != "next":
                    raise Remote(type(error).__name__)  # it would silently end a loop of the caller
                raise error
            self._answer(message)

    def serve(self) -> None:
        """Serve the requests of the other side until it ends."""
        while True:
            self._answer(self.receive())

    def send(self, message: Any) -> None:
        """Send one message."""
        data = json.dumps(message).encode()
        try:
            self._end.send_bytes(data)
        except OSError as error:
            raise Gone from error

    def receive(self) -> Any:
        """Receive the next message."""
        try:
            return json.loads(self._end.recv_bytes(_MAX_BYTES))
        except (EOFError, OSError, ValueError) as error:  # the end, too large, not JSON
            raise Gone from error

    def encode(self, value: Any) -> Any:
        """Encode a value for the other side."""
        return codec.encode(value, self._refer)

    def decode(self, data: Any) -> Any:
        """Decode a value from the other side."""
        return codec.decode(data, self._resolve)

    def _answer(self, message: Any) -> None:
        try:
            verb, target, arguments = message
            reply = ["value", self.encode(self._do(verb, self.mine[target], [self.decode(a) for a in arguments]))]
        except Gone:
            raise
        except BaseException as error:
            reply = self._raised(error)
        self.send(reply)

    def _do(self, verb: str, target: Any, arguments: list[Any]) -> Any:
        if verb == "call":
            positional, named = arguments
            result = target(*positional, **named)
            return result, [x if codec.mutable(x) else None for x in [*positional, *named.values()]]
        if verb in ("getattr", "setattr"):
            if not self._may(target, arguments[0]):
                raise AttributeError(arguments[0])
            if verb == "setattr" and callable(getattr(type(target), arguments[0], None)):
                raise AttributeError(f"{arguments[0]} is a method")  # the owner would call the other side's function
            return getattr(builtins, verb)(target, *arguments)
        return _SPECIAL[verb](target, *arguments)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return ["yours", value._rlkit_id]
        number = id(value)
        self.mine[number] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            built_in = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
            return ["exception", number, value.__name__, built_in]
        base = codec.base_value(value)
        return ["mine", number, None if base is None else [self.encode(base)]]

    def _resolve(self, kind: str, number: int, *rest: Any) -> Any:
        if kind == "yours":
            return self.mine[number]
        if kind == "mine":
            return Proxy(self, number, *([self.decode(rest[0][0])] if rest[0] else []))
        if number not in self._exceptions:
            base = getattr(builtins, str(rest[1]), None)
            base = base if isinstance(base, type) and issubclass(base, Exception) else Exception
            self._exceptions[number] = type(str(rest[0]), (base,), {})
        return self._exceptions[number]

    def _raised(self, error: BaseException) -> Any:
        arguments = [a for a in error.args if isinstance(a, str | int | float | bool | None)][:4]
        try:
            return ["raised", self.encode(type(error)), type(error).__name__, arguments]
        except BaseException:
            return ["raised", None, type(error).__name__, []]

    def _rebuilt(self, kind: Any, name: str, arguments: list[Any]) -> BaseException:
        cls = self.decode(kind)
        if isinstance(cls, type) and issubclass(cls, Exception):
            try:
                return cls(*arguments)
            except Exception:
                return cls()
        return Remote(name, *arguments)


class Proxy:
    """A handle for an object of the other side. With a `base`, a value of a built-in type, it compares as that."""

    __slots__ = ("_rlkit_base", "_rlkit_id", "_rlkit_peer")

    def __init__(self, peer: Peer, number: int, *base: Any) -> None:
        object.__setattr__(self, "_rlkit_peer", peer)
        object.__setattr__(self, "_rlkit_id", number)
        object.__setattr__(self, "_rlkit_base", base)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # numpy reads memory at an `__array_interface__`
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, changed = _ask(self, "call", list(args), kwargs)
        for old, new in zip([*args, *kwargs.values()], changed):
            codec.replace_content(old, new)
        return result

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Proxy):
            return _ask(self, "eq", other)
        return bool(self._rlkit_base) and self._rlkit_base[0] == other

    def __hash__(self) -> int:
        return hash(self._rlkit_base[0]) if self._rlkit_base else self._rlkit_id

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and bool(_ask(self, "isinstance", instance))

    def __exit__(self, *_: object) -> None:
        _ask(self, "exit")


def _ask(proxy: Proxy, verb: str, *arguments: Any) -> Any:
    return proxy._rlkit_peer.ask(verb, proxy._rlkit_id, *arguments)


def _forward(verb: str) -> Callable[..., Any]:
    def method(self: Proxy, *arguments: Any) -> Any:
        plain = verb in _BETWEEN and not isinstance(arguments[0], Proxy)
        return NotImplemented if plain else _ask(self, verb, *arguments)

    return method


for _verb in (*_ALONE, "neg", "enter", *_ITEMS, *_BETWEEN):
    setattr(Proxy, f"__{_verb}__", _forward(_verb))
