"""A decoder with the head that turns hidden states into what a learner wants.

Shapes: R rows, L row positions, N response tokens, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax.trainer import attention
from relax.trainer.attention import Reading
from relax.trainer.device import wider
from relax.trainer.logprob import linear_logp, top_words


class LogpHead(nn.Module):
    """The language-model head; its forward gives log-probabilities instead of logits."""

    hf_name = "lm_head.weight"
    outputs = ("logp", "entropy")

    def __init__(self, weight_VH: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VH

    def forward(
        self, hidden_NH: Tensor, target_N: Tensor, temperature: float, num_top: int = 0
    ) -> tuple[Tensor, ...]:
        """logp_N of the targets and entropy_N, float32, in nats.

        With num_top > 0 the likeliest words instead, targets or not: word_NK alone.
        """
        if num_top:
            return (top_words(hidden_NH, self.weight, num_top),)
        return linear_logp(hidden_NH, self.weight, target_N, temperature)


class ValueHead(nn.Module):
    """One number for each position: the expected return before the predicted token."""

    hf_name = "score.weight"
    outputs = ("value",)

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype))

    def forward(self, hidden_NH: Tensor) -> tuple[Tensor]:
        """value_N, float32 (float64 from float64): a product of its own, not a view of one."""
        wide = wider(hidden_NH)
        return (torch.mv(hidden_NH.to(wide), self.weight[0].to(wide)),)


class SequenceModel(nn.Module):
    """Decoder and head; forward gives the head's outputs at the positions asked for.

    Dropout stays off: the ratio of two log-probabilities must not depend on a coin.
    """

    def __init__(self, decoder: PreTrainedModel, head: LogpHead | ValueHead) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head
        self._prefix = decoder.base_model_prefix
        self.eval()

    def forward(
        self,
        token_RL: Tensor,
        position_RL: Tensor,
        reading: Reading | None,
        source_N: Tensor,
        *head_arguments,
    ) -> tuple[Tensor, ...]:
        """The head's outputs where source_N (flat into [R, L]) predicts.

        reading: who attends to whom, given where the model shares_prompts.
        """
        hidden_RLH = self.decoder(
            input_ids=token_RL,
            position_ids=position_RL,
            attention_mask=None,
            use_cache=False,
            **({} if reading is None else {"reading": reading}),
        ).last_hidden_state
        hidden_NH = hidden_RLH.flatten(0, 1).index_select(0, source_N)
        return self.head(hidden_NH, *head_arguments)

    @property
    def shares_prompts(self) -> bool:
        """Whether its attention goes by a Reading instead of by positions that restart."""
        return self.decoder.config._attn_implementation == attention.NAME

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding table."""
        return self.head.weight is self.decoder.get_input_embeddings().weight

    def tie(self) -> None:
        """Make the head the embedding table again, after something replaced the parameters."""
        self.head.weight = self.decoder.get_input_embeddings().weight  # type: ignore[assignment]

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order."""
        kinds = set(self.decoder._no_split_modules or ())
        return [module for module in self.decoder.modules() if type(module).__name__ in kinds]

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters under their Hugging Face names, sorted; a tied head appears once."""
        weights = {}
        for name, weight in self.named_parameters():
            is_head = name == "head.weight"
            known = self.head.hf_name if is_head else name.replace("decoder", self._prefix, 1)
            weights[known] = weight
        return dict(sorted(weights.items()))
