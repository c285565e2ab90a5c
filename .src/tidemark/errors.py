"""Every error of Tidemark, by who must act: `Retry` again, `Reject` one record, `Stop` for a person.

The tree is drawn in `tidemark.streaming.errors`, where the errors are defined.
"""

from tidemark.streaming.errors import *  # noqa: F403 - all of them, and that module imports none but its own
