"""What proposes tokens: models, blocks, texts, the host."""

from __future__ import annotations

from specattn.speculative.proposers.host import HostProposer as HostProposer
from specattn.speculative.proposers.host import HostTree as HostTree
from specattn.speculative.proposers.lookup import LookupFirst as LookupFirst
from specattn.speculative.proposers.lookup import LookupProposer as LookupProposer
from specattn.speculative.proposers.proposer import Proposer as Proposer
