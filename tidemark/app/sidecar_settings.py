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
        description="File of bearer tokens, one a line, read again when it changes; without it everybody may read.",
    )
    sidecar_certificate_file: Path | None = Field(
        None, description="PEM file of the certificate, with its chain, by which HTTP and lines are served with TLS."
    )
    sidecar_key_file: Path | None = Field(
        None, description="PEM file of the key of that certificate; both are read again when they change."
    )
    sidecar_ca_file: Path | None = Field(
        None, description="PEM file of the authority that signed it: `tidemark listen` asks with TLS then."
    )
    sidecar_cors_origins: str = Field(
        "", description="Web sites whose scripts may read the sidecar: https://host[,...]."
    )
    sidecar_allowed_hosts: str = Field(
        "",
        description="Names it may be asked by, with commas; without it any, and on a loopback address its names.",
    )
    sidecar_trusted_proxies: Proxies = Field(
        "",
        description="Addresses or networks of proxies, with commas, whose X-Forwarded-For names the client; * = any.",
    )
    sidecar_max_connections: Positive = Field(5000, description="Connections that the sidecar serves at once.")
    sidecar_max_open_requests: Positive = Field(
        2500, description="Waits and event streams that the sidecar holds open at once."
    )
    sidecar_banner: str = Field(
        "", description="What the live page tells everybody above the streams; further lines are folded on a phone."
    )
    sidecar_max_wait_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(
        60.0, description="How long one wait may last at most."
    )

    lines_listen: HostPort = Field(
        "127.0.0.1:9481", description="Address of the sidecar's line protocol, host:port; port 0 = any free one."
    )
    lines_max_connections: Positive = Field(1000, description="Clients of the line protocol served at once.")
    lines_server_name: Annotated[str, Field(pattern=r"^\S{1,255}$")] = Field(
        "tidemark", description="Name of the server, which the line protocol begins with; sidecars of one name relay."
    )
    lines_redis_channel: Annotated[str | None, Field(pattern=r"^\S{1,255}$")] = Field(
        None,
        description="Channel of Redis on which sidecars speak the line protocol too, with /n behind in database n, if"
        " that is not 0; without it they do not.",
    )
    lines_row_buffer_mib: Positive = Field(
        64, description="MiB of rows that wait for positions; past it, clients of the line protocol fetch."
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
