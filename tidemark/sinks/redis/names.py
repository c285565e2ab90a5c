"""The names in Redis: a stream's keys and its channel, and the keys of all. Nobody else builds or reads them.

What belongs to one stream shares a hash tag, so that a Cluster keeps it together. The tag is the stream's name, in
which a `}` would end it: there `{` is written `{<` and `}` is written `{>`. A name without braces is its own tag.
"""

STREAMS = "tidemark:streams"
SENTINEL = "tidemark:sentinel"
CHANNELS = "tidemark:{*}"
"""The pattern that all channels of streams match, and nothing else of ours."""


def tag(name: str) -> str:
    """The hash tag of `name`, with the braces around it. No two names have the same."""
    return "{" + name.replace("{", "{<").replace("}", "{>") + "}"


def key(stream: str, name: str) -> str:
    return f"{channel(stream)}:{name}"


def channel(stream: str) -> str:
    return f"tidemark:{tag(stream)}"


def lines_channel(server: str) -> str:
    """Where sidecars of the line protocol that call themselves `server` pass commands on to each other."""
    return f"tidemark:lines:{server}"


def stream_of(channel: str) -> str:
    """The stream of a channel that matches `CHANNELS`."""
    return channel.removeprefix("tidemark:{").removesuffix("}").replace("{>", "}").replace("{<", "{")
