"""The wire format, held against Google's implementation of it."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from shim import task, ttrpc, wire

F = descriptor_pb2.FieldDescriptorProto
_KINDS = {str: F.TYPE_STRING, bytes: F.TYPE_BYTES, int: F.TYPE_INT64, bool: F.TYPE_BOOL}
MESSAGES = [
    value
    for module in (ttrpc, task)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, wire.Message) and value is not wire.Message
]
MESSAGES = sorted(set(MESSAGES), key=lambda cls: cls.__name__)


def _google_classes():
    file = descriptor_pb2.FileDescriptorProto(name="fermata_test.proto", package="t", syntax="proto3")
    for cls in MESSAGES:
        message = file.message_type.add(name=cls.__name__)
        for number, (name, kind) in cls.FIELDS.items():
            repeated = isinstance(kind, list)
            kind = kind[0] if repeated else kind
            field = message.field.add(name=name, number=number)
            field.label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
            if issubclass(kind, wire.Message):
                field.type, field.type_name = F.TYPE_MESSAGE, f".t.{kind.__name__}"
            else:
                field.type = _KINDS[kind]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        c.__name__: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{c.__name__}")) for c in MESSAGES
    }


GOOGLE = _google_classes()
_VALUES = {
    str: st.text(st.characters(exclude_categories=("Cs",))),
    bytes: st.binary(),
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    bool: st.booleans(),
}


def _strategy(cls):
    def value(kind):
        if isinstance(kind, list):
            return st.lists(value(kind[0]), max_size=3)
        if issubclass(kind, wire.Message):
            return st.none() | _strategy(kind)
        return _VALUES[kind]

    def repeated_safe(kind):
        return st.lists(_strategy(kind[0]), max_size=3) if _is_message_list(kind) else value(kind)

    return st.fixed_dictionaries({name: repeated_safe(kind) for name, kind in cls.FIELDS.values()}).map(
        lambda values: cls(**values)
    )


def _is_message_list(kind):
    return isinstance(kind, list) and issubclass(kind[0], wire.Message)


def _to_google(message):
    target = GOOGLE[type(message).__name__]()
    for name, _ in message.FIELDS.values():
        value = getattr(message, name)
        if isinstance(value, list):
            getattr(target, name).extend(_to_google(v) if isinstance(v, wire.Message) else v for v in value)
        elif isinstance(value, wire.Message):
            getattr(target, name).CopyFrom(_to_google(value))
        elif value is not None:
            setattr(target, name, value)
    return target


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_each_message_is_written_and_read_as_protobuf_does(cls, data):
    message = data.draw(_strategy(cls))
    google = _to_google(message)
    assert GOOGLE[cls.__name__].FromString(message.encode()) == google
    assert cls.decode(google.SerializeToString()).encode() == message.encode()


def test_fields_that_are_not_declared_come_through():
    raw = wire.delimited(1, b"c1") + wire.delimited(77, b"new") + wire.varint(78 << 3) + wire.varint(5)
    message = task.IdRequest.decode(raw)
    message.id = "c2"
    assert message.encode() == wire.delimited(1, b"c2") + wire.delimited(77, b"new") + wire.varint(
        78 << 3
    ) + wire.varint(5)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(data):
    for cls in (ttrpc.Request, task.CreateTaskRequest):
        try:
            cls.decode(data)
        except wire.WireError:
            pass


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a\x05ab", "ends inside field 1"),
        (b"\x0a", "ends inside a number"),
        (b"\x00\x01", "field number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x08\x01", "ExecRequest.id has wire type 0"),
        (b"\x0a\x01\xff", "ExecRequest.id is not UTF-8"),
        (b"\x18" + b"\xff" * 10 + b"\x01", "more than 64 bits"),
    ],
)
def test_a_broken_message_is_refused_by_name(data, words):
    with pytest.raises(wire.WireError, match=words):
        task.ExecRequest.decode(data)
