"""The SentencePiece tokenizer of a run as a PreTrainedTokenizerFast, which gives the same tokens."""

from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from logdepth.data import Tokenizer
from logdepth.errors import UserError

SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def fast_tokenizer(tokenizer: Tokenizer, *, separated: bool = True) -> PreTrainedTokenizerFast:
    """The same tokenizer for Hugging Face.

    It adds no token to a text, and the names of special tokens in a text are text, as in the library. The token after a
    document also starts one, where the model knows it, and pads batches.

    Args:
        tokenizer: a tokenizer of the library.
        separated: whether the model knows the end of a document; otherwise a text has no first and no last token.
    """
    saved = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece.Type
    if saved.trainer_spec.model_type != sentencepiece_model_pb2.TrainerSpec.BPE:
        raise UserError("only BPE models of SentencePiece can be exported")
    if any(one.type in (kinds.USER_DEFINED, kinds.UNUSED) for one in saved.pieces):
        raise UserError("a tokenizer with user-defined or unused pieces cannot be exported: its tokens would differ")
    pieces = [one.piece for one in saved.pieces]
    fast = FastTokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges({one.piece: one.score for one in saved.pieces if one.type == kinds.NORMAL}),
            unk_token=pieces[tokenizer.unknown],
            fuse_unk=True,
            byte_fallback=saved.trainer_spec.byte_fallback,
        )
    )
    fast.normalizer = normalizer(saved.normalizer_spec)
    fast.decoder = decoder()
    fast.add_special_tokens(
        [AddedToken(one.piece, special=True) for one in saved.pieces if one.type in (kinds.CONTROL, kinds.UNKNOWN)]
    )
    end = pieces[tokenizer.end_of_document]
    known = {"bos_token": end, "eos_token": end} if separated else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        unk_token=pieces[tokenizer.unknown],
        pad_token=end,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **known,
    )


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece makes them.

    SentencePiece merges the pair whose result has the highest score. All pairs with the same result have the same score
    there, and the leftmost comes first; here one pair must come before the other.
    """
    found = []
    for piece in sorted(scores, key=lambda one: -scores[one]):
        cuts = ((piece[:place], piece[place:]) for place in range(1, len(piece)))
        found += [pair for pair in cuts if pair[0] in scores and pair[1] in scores]
    return found


def normalizer(spec: Any) -> normalizers.Normalizer:
    """What SentencePiece does to a text before it merges."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{SPACE}+$"), ""))
    return normalizers.Sequence(steps)


def decoder() -> decoders.Decoder:
    """Tokens to text, as `Tokenizer.decode` does it, but with the space that the paper's tokenizers put before a text.

    What follows a prompt is often decoded alone, by transformers' pipelines too, and must keep its first space.
    """
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    # A space comes back from single bytes where the training text had none.
    return decoders.Sequence([*steps, decoders.Replace(SPACE, " ")])
