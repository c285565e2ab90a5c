"""Settings (being written)."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TIDEMARK_")
    home: Path = Path.home() / ".cache" / "tidemark"
    java_home: Path | None = Field(None, validation_alias="JAVA_HOME")
