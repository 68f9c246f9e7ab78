"""Sessions of streamed input: a request whose prompt goes on when it has been answered."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate


class SessionScheduler(Scheduler):
    """vLLM's scheduler, which drops the last token of an answer, wherever computing has got to.

    vLLM 0.32 keeps what counts as computed. That leaves out a block whose causal pass is to come,
    and counts drafts, or a block of an asynchronous step, that were written behind a stop token.
    What the answer has in flight is taken from it, and leaves parts of blocks.
    """

    _block_length = 1  # only whole blocks of so many tokens have KV

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        kept = session.num_tokens - 1
        num_computed = min(session.num_computed_tokens, kept)
        session.num_computed_tokens = kept
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = num_computed - num_computed % self._block_length
        if not session.num_computed_tokens:
            # vLLM takes such a request for one that has neither pages nor a place in the worker.
            self._free_request_blocks(session)
            self.reset_preempted_req_ids.add(session.request_id)
