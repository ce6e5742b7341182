"""What a config is made of: sections with keys."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Resume = Literal["harmless", "maths", "breaks"]
"""What a changed key means for a run that resumes: nothing, other numbers from here on, or a refusal."""


def key(default: Any, text: str, *, resume: Resume = "harmless", **limits: Any) -> Any:
    """A config key: its default, its line of help, its class on resume, and limits such as `ge=1`."""
    return Field(default, description=text, json_schema_extra={"resume": resume}, **limits)


class Section(BaseModel):
    """One section of the config. Unknown keys are errors; values are not coerced; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=False)
