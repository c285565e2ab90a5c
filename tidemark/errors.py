"""The errors of Tidemark, in three classes.

After a `Retry`, the caller tries again. A `Reject` concerns only one record or argument. After a `Stop`, a person must
correct something.

`tidemark.common.errors` defines these errors, with their texts and fields. `exit_on_error` ends a program with the
short text of an error.
"""

from tidemark.common.errors import BadCommand as BadCommand
from tidemark.common.errors import BadRecord as BadRecord
from tidemark.common.errors import BadRow as BadRow
from tidemark.common.errors import BadSetting as BadSetting
from tidemark.common.errors import BadToken as BadToken
from tidemark.common.errors import BatchTimedOut as BatchTimedOut
from tidemark.common.errors import BatchTooLarge as BatchTooLarge
from tidemark.common.errors import ChainBroken as ChainBroken
from tidemark.common.errors import CheckpointNotWritable as CheckpointNotWritable
from tidemark.common.errors import ConfigurationChanged as ConfigurationChanged
from tidemark.common.errors import ContentRefused as ContentRefused
from tidemark.common.errors import ExtraMissing as ExtraMissing
from tidemark.common.errors import FactsReplaced as FactsReplaced
from tidemark.common.errors import LateNeedsWriter as LateNeedsWriter
from tidemark.common.errors import LateUnknown as LateUnknown
from tidemark.common.errors import LeaseLost as LeaseLost
from tidemark.common.errors import MalformedFact as MalformedFact
from tidemark.common.errors import NotReached as NotReached
from tidemark.common.errors import NotReserved as NotReserved
from tidemark.common.errors import PartitionsChanged as PartitionsChanged
from tidemark.common.errors import PrerequisitePending as PrerequisitePending
from tidemark.common.errors import QueryFailed as QueryFailed
from tidemark.common.errors import ReaderInUse as ReaderInUse
from tidemark.common.errors import ReaderModeChanged as ReaderModeChanged
from tidemark.common.errors import ReaderPartitionsChanged as ReaderPartitionsChanged
from tidemark.common.errors import RecordsBeyondEnd as RecordsBeyondEnd
from tidemark.common.errors import RecordsGone as RecordsGone
from tidemark.common.errors import RecordsRefused as RecordsRefused
from tidemark.common.errors import Refused as Refused
from tidemark.common.errors import Reject as Reject
from tidemark.common.errors import Retry as Retry
from tidemark.common.errors import RowUnreadable as RowUnreadable
from tidemark.common.errors import SchemaMismatch as SchemaMismatch
from tidemark.common.errors import SequenceWentBack as SequenceWentBack
from tidemark.common.errors import ShardsChanged as ShardsChanged
from tidemark.common.errors import Slow as Slow
from tidemark.common.errors import SparkDied as SparkDied
from tidemark.common.errors import StateTooNew as StateTooNew
from tidemark.common.errors import Stop as Stop
from tidemark.common.errors import Stopping as Stopping
from tidemark.common.errors import StreamNotKnown as StreamNotKnown
from tidemark.common.errors import TidemarkError as TidemarkError
from tidemark.common.errors import TopicMissing as TopicMissing
from tidemark.common.errors import TopicReplaced as TopicReplaced
from tidemark.common.errors import TransactionEnded as TransactionEnded
from tidemark.common.errors import Unavailable as Unavailable
from tidemark.common.errors import UnsuitableSequence as UnsuitableSequence
from tidemark.common.errors import VersionSkew as VersionSkew
from tidemark.common.errors import WrongCleanupPolicy as WrongCleanupPolicy
from tidemark.common.errors import exit_on_error as exit_on_error
