"""Numbers for the incarnations (stream, writer, epoch) that a task meets, so that arrays can hold them."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streaming.wire import is_name


class Incarnations:
    """Numbered from 0 in the order in which they were met.

    `number_of[writer][epoch][stream]` is asked once per record, hence plain dicts, the largest last: where streams are
    many, their writers are few. Who misses there calls `number`.
    """

    def __init__(self) -> None:
        self.number_of: dict[str, dict[int, dict[str, int]]] = {}
        self.all: list[tuple[str, str, int]] = []
        self.streams: list[str] = []
        self._stream_of: list[int] = []
        self._stream_numbers: dict[str, int] = {}
        self._keys = pa.array([], pa.binary())

    def number(self, stream: str, writer: str, epoch: int) -> int:
        """The number of an incarnation, new or known."""
        numbers = self.number_of.setdefault(writer, {}).setdefault(epoch, {})
        if stream not in numbers:
            numbers[stream] = len(self.all)
            self.all.append((stream, writer, epoch))
            if stream not in self._stream_numbers:
                self._stream_numbers[stream] = len(self.streams)
                self.streams.append(stream)
            self._stream_of.append(self._stream_numbers[stream])
        return numbers[stream]

    def stream_of(self) -> npt.NDArray[np.int64]:
        """By number of an incarnation: the place of its stream in `streams`."""
        return np.array(self._stream_of, np.int64)

    def keys(self) -> pa.BinaryArray:
        """By number of an incarnation: the Kafka key of its records; null where a name is none (`wire.is_name`)."""
        new = self.all[len(self._keys) :]
        if new:
            keys = [stream.encode() if is_name(stream) and is_name(writer) else None for stream, writer, _ in new]
            self._keys = pa.concat_arrays([self._keys, pa.array(keys, pa.binary())])
        return self._keys
