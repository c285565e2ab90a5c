"""Every error of Tidemark, by who must act: `Retry` again, `Reject` one record, `Stop` for a person.

They are defined in `tidemark.streaming.errors`, with their texts and fields.
"""

from tidemark.streaming.errors import BadCommand as BadCommand
from tidemark.streaming.errors import BadRecord as BadRecord
from tidemark.streaming.errors import BadRow as BadRow
from tidemark.streaming.errors import BadSetting as BadSetting
from tidemark.streaming.errors import BadToken as BadToken
from tidemark.streaming.errors import BatchCut as BatchCut
from tidemark.streaming.errors import BatchEnded as BatchEnded
from tidemark.streaming.errors import ChainBroken as ChainBroken
from tidemark.streaming.errors import CheckpointNotWritable as CheckpointNotWritable
from tidemark.streaming.errors import ContentRefused as ContentRefused
from tidemark.streaming.errors import ExtraMissing as ExtraMissing
from tidemark.streaming.errors import FactsReplaced as FactsReplaced
from tidemark.streaming.errors import FactUnfit as FactUnfit
from tidemark.streaming.errors import LateNeedsWriter as LateNeedsWriter
from tidemark.streaming.errors import LateUnknown as LateUnknown
from tidemark.streaming.errors import LeaseLost as LeaseLost
from tidemark.streaming.errors import NotReached as NotReached
from tidemark.streaming.errors import NotReserved as NotReserved
from tidemark.streaming.errors import OthersFirst as OthersFirst
from tidemark.streaming.errors import Outdated as Outdated
from tidemark.streaming.errors import PartitionsChanged as PartitionsChanged
from tidemark.streaming.errors import QueryFailed as QueryFailed
from tidemark.streaming.errors import ReaderModeChanged as ReaderModeChanged
from tidemark.streaming.errors import RecordsBeyondEnd as RecordsBeyondEnd
from tidemark.streaming.errors import RecordsGone as RecordsGone
from tidemark.streaming.errors import RecordsRefused as RecordsRefused
from tidemark.streaming.errors import Refused as Refused
from tidemark.streaming.errors import Reject as Reject
from tidemark.streaming.errors import Retry as Retry
from tidemark.streaming.errors import RowUnreadable as RowUnreadable
from tidemark.streaming.errors import SchemaMismatch as SchemaMismatch
from tidemark.streaming.errors import SequenceUnfit as SequenceUnfit
from tidemark.streaming.errors import SequenceWentBack as SequenceWentBack
from tidemark.streaming.errors import ShardsChanged as ShardsChanged
from tidemark.streaming.errors import Slow as Slow
from tidemark.streaming.errors import SparkDied as SparkDied
from tidemark.streaming.errors import StateTooNew as StateTooNew
from tidemark.streaming.errors import Stop as Stop
from tidemark.streaming.errors import Stopping as Stopping
from tidemark.streaming.errors import StreamNotKnown as StreamNotKnown
from tidemark.streaming.errors import TidemarkError as TidemarkError
from tidemark.streaming.errors import TokenFromTheFuture as TokenFromTheFuture
from tidemark.streaming.errors import TopicCompacted as TopicCompacted
from tidemark.streaming.errors import TopicMissing as TopicMissing
from tidemark.streaming.errors import TopicReplaced as TopicReplaced
from tidemark.streaming.errors import Unavailable as Unavailable
from tidemark.streaming.errors import VersionSkew as VersionSkew
from tidemark.streaming.errors import exit_on_error as exit_on_error
