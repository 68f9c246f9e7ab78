"""EmittedBlocks: vLLM's own matcher checks what canvases with a grammar emit."""

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class EmittedBlocks:
    """What the scheduler asks vLLM's manager of structured outputs: to check what is emitted.

    Args:
        manager: vLLM's, with the matchers of all requests.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Canvases stay whole: read from left to right, noise is no text of any grammar."""
        return spec_tokens

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Whether vLLM's matcher accepts an emitted block; a request ends with an error if not."""
        return self._manager.accept_tokens(request, new_token_ids)
