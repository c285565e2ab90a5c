"""The settings of the sidecar: a part of `app.settings`, which reads them."""

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tidemark.app.connections import AnyPort, HostPort, Positive, go_together


def _are_proxies(text: str) -> str:
    for proxy in _listed(text):
        try:
            proxy == "*" or ip_network(proxy)
        except ValueError:
            raise ValueError("not addresses or networks such as 10.0.0.7,10.0.0.0/8") from None
    return text


Proxies = Annotated[str, AfterValidator(_are_proxies)]


class SidecarSettings(BaseModel):
    model_config = ConfigDict(defer_build=True)  # only `Settings`, which inherits it, is used

    sidecar_host: str = Field("127.0.0.1", min_length=1, description="Address that the sidecar listens on.")
    sidecar_port: AnyPort = Field(9480, description="Port of the sidecar; 0 = any free one.")
    sidecar_tokens_file: Path | None = Field(
        None,
        description="File of bearer tokens, one a line, read again when it changes; without it every client may read.",
    )
    sidecar_certificate_file: Path | None = Field(
        None, description="PEM file of the certificate, with its chain: HTTP and lines are served with TLS."
    )
    sidecar_key_file: Path | None = Field(
        None, description="PEM file of the key of that certificate; both are read again when they change."
    )
    sidecar_ca_file: Path | None = Field(
        None, description="PEM file of the authority that signed the certificate: `tidemark listen` connects with TLS."
    )
    sidecar_cors_origins: str = Field(
        "", description="Web sites whose scripts may read the sidecar: https://host[,...]."
    )
    sidecar_allowed_hosts: str = Field(
        "",
        description="Accepted `Host` names, comma-separated; by default any, or on a loopback address its names.",
    )
    sidecar_trusted_proxies: Proxies = Field(
        "",
        description="Addresses or networks, comma-separated, of proxies whose X-Forwarded-For counts; * = any.",
    )
    sidecar_max_connections: Positive = Field(5000, description="Connections that the sidecar serves at the same time.")
    sidecar_max_open_requests: Positive = Field(
        2500, description="Waits and event streams that may be open at the same time."
    )
    sidecar_banner: str = Field("", description="Banner text on the live page; further lines are folded on a phone.")
    sidecar_max_wait_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(
        60.0, description="Seconds that one wait may last."
    )

    lines_listen: HostPort = Field(
        "127.0.0.1:9481", description="Address of the sidecar's line protocol, host:port; port 0 = any free one."
    )
    lines_max_connections: Positive = Field(
        1000, description="Clients of the line protocol that are served at the same time."
    )
    lines_server_name: Annotated[str, Field(pattern=r"^\S{1,255}$")] = Field(
        "tidemark",
        description="Server name in the first line of the line protocol; sidecars with the same name relay commands.",
    )
    lines_redis_channel: Annotated[str | None, Field(pattern=r"^\S{1,255}$")] = Field(
        None,
        description="Redis channel on which sidecars announce positions too. In database n (not 0), /n is appended"
        " to the name. Without it they announce over TCP alone.",
    )
    lines_row_buffer_mib: Positive = Field(
        64, description="MiB of rows that wait for positions; beyond that, clients of the line protocol fetch."
    )

    @model_validator(mode="after")
    def _sidecar_certificate_has_its_key(self) -> Self:
        go_together(self, "sidecar_certificate_file", "sidecar_key_file")
        return self

    @property
    def sidecar_origins(self) -> list[str]:
        return _listed(self.sidecar_cors_origins)

    @property
    def sidecar_proxies(self) -> list[str]:
        return _listed(self.sidecar_trusted_proxies)

    @property
    def sidecar_names(self) -> list[str]:
        return _listed(self.sidecar_allowed_hosts)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
