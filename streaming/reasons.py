"""Why a record was sent to the dead letters: one exact reason for every kind of bad record."""

from enum import StrEnum


class Reason(StrEnum):
    # found while decoding, from the record alone
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_KIND = "unknown_kind"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    OUT_OF_64_BITS = "out_of_64_bits"
    ID_NOT_BEYOND_PREV = "id_not_beyond_prev"
    NEGATIVE_EPOCH = "negative_epoch"
    BAD_NAME = "bad_name"
    KEY_MISMATCH = "key_mismatch"
    WRONG_TOPIC = "wrong_topic"
    # found while decoding or against the stream's direction
    MIXED_SIGN = "mixed_sign"
    # found against the stream's state
    ZOMBIE = "zombie"
    CONFLICT = "conflict"
    UNKNOWN_WRITER = "unknown_writer"
    WRONG_PARTITION = "wrong_partition"
    PENDING_OVERFLOW = "pending_overflow"
    HELD_OVERFLOW = "held_overflow"
