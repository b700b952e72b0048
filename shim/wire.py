"""Protocol Buffers' wire format, as much of it as a proxy needs.

The shim reads a handful of scalar fields of a few messages and must keep every byte it does not know. The protobuf
package does that too, but importing it costs 20 ms and several MB in a process that runs once per container; tests hold
this module against it. Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

TYPE_CHECKING = False  # `import typing` costs 15 ms; type checkers take this name for typing's own
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, ClassVar

    from typing_extensions import Self

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are not a message of the expected type."""


def varint(number: int) -> bytes:
    """Encode an unsigned integer, or a negative one as its 64-bit two's complement."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(data):
            raise WireError("message ends inside a number")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (1 << 64) - 1, at
        shift += 7
        if shift > 63:
            raise WireError("number of more than 64 bits")


def fields(data: bytes) -> Iterator[tuple[int, int, Any, bytes]]:
    """Yield (field number, wire type, value, the field's raw bytes) for each field of a message.

    Raises WireError when the bytes are not a message.
    """
    at = 0
    end = len(data)
    value: int | bytes
    while at < end:
        begin = at
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("field number 0")
        if kind == VARINT:
            value, at = _read_varint(data, at)
        elif kind == LENGTH:
            size, at = _read_varint(data, at)
            value = data[at : at + size]
            at += size
        elif kind == FIXED64:
            value = data[at : at + 8]
            at += 8
        elif kind == FIXED32:
            value = data[at : at + 4]
            at += 4
        else:
            raise WireError(f"field {number} has wire type {kind}, which no current message uses")
        if at > end:
            raise WireError(f"message ends inside field {number}")
        yield number, kind, value, data[begin:at]


def delimited(number: int, data: bytes) -> bytes:
    """Encode field `number` with length-delimited bytes."""
    return varint(number << 3 | LENGTH) + varint(len(data)) + data


class Message:
    """A message with declared fields. Undeclared fields are kept, in order, behind the declared ones.

    `FIELDS` maps a field number to (attribute, type): `str`, `bytes`, `int`, `bool`, a Message class, or a one-item
    list of one of these for a repeated field. Absent fields read as proto3 defaults; a message field as None.
    """

    FIELDS: ClassVar[dict[int, tuple[str, Any]]] = {}
    unknown: bytes

    def __init__(self, **values: Any) -> None:
        self.unknown = b""
        for name, kind in self.FIELDS.values():
            if name in values:
                setattr(self, name, values.pop(name))
            elif isinstance(kind, list):
                setattr(self, name, [])
            else:
                setattr(self, name, None if issubclass(kind, Message) else kind())
        if values:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(values)}")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a message. Raises WireError when the bytes are not one."""
        message = cls()
        unknown = []
        for number, wire_type, value, raw in fields(data):
            if number not in cls.FIELDS:
                unknown.append(raw)
                continue
            name, kind = cls.FIELDS[number]
            if isinstance(kind, list):
                getattr(message, name).append(_decode_value(cls, name, kind[0], wire_type, value))
            else:
                setattr(message, name, _decode_value(cls, name, kind, wire_type, value))
        message.unknown = b"".join(unknown)
        return message

    def encode(self) -> bytes:
        """Write the message, fields in the order of their declaration, defaults left out as proto3 does."""
        out: list[bytes] = []
        for number, (name, kind) in self.FIELDS.items():
            value = getattr(self, name)
            if isinstance(kind, list):
                out.extend(_encode_value(number, item) for item in value)
            elif value is not None and (value or isinstance(value, Message)):
                out.append(_encode_value(number, value))
        out.append(self.unknown)
        return b"".join(out)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name, _ in self.FIELDS.values() if getattr(self, name))
        return f"{type(self).__name__}({shown})"


def _decode_value(owner: type[Message], name: str, kind: Any, wire_type: int, value: Any) -> Any:
    expected = VARINT if kind in (int, bool) else LENGTH
    if wire_type != expected:
        raise WireError(f"{owner.__name__}.{name} has wire type {wire_type}, expected {expected}")
    if kind is str:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise WireError(f"{owner.__name__}.{name} is not UTF-8") from error
    if kind is int:
        return value - (1 << 64) if value >> 63 else value
    if kind is bool:
        return value != 0
    return value if kind is bytes else kind.decode(value)


def _encode_value(number: int, value: Any) -> bytes:
    if isinstance(value, int):  # bool too
        return varint(number << 3 | VARINT) + varint(value)
    if isinstance(value, str):
        # A file's name may hold bytes that are no text, and an error that quotes it has to be sent all the same.
        value = value.encode("utf-8", "backslashreplace")
    elif isinstance(value, Message):
        value = value.encode()
    return delimited(number, value)
