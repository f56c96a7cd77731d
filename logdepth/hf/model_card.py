"""The README.md of an exported model."""

from typing import Any, cast

from logdepth.blocks import AttentionConfig
from logdepth.blocks.spec import block_text
from logdepth.models import LMConfig, num_parameters
from logdepth.runs import LoadedRun, RunFolder, Weights
from logdepth.version import __version__

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [logdepth]
---

# {name}

A language model of {parameters:,} parameters, trained with logdepth {version} on the corpus `{corpus}`.

## Use
With transformers, torch and NumPy:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("DIR", trust_remote_code=True)
inputs = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

Where logdepth is installed, `import logdepth.hf` takes the place of `trust_remote_code=True`. `logdepth export DIR --to
run RUN` makes it a run of logdepth again.

## Model
| | |
|---|---|
| kind | {kind} |
| blocks | {blocks} |
| width | {dim} |
| vocabulary | {vocab_size:,} pieces of SentencePiece BPE, {text} |
| state while generating | {state} |

## Training
| | |
|---|---|
| corpus | {corpus} |
| steps | {step:,} of {batch_size} windows of {context} tokens |
| optimizer | {optimizer}, peak learning rate {learning_rate:g} |
| weights | {weights} |
| validation loss | {loss} |
| seed | {seed} |

The loss is per token, so it can be compared only between models with the same tokenizer. `run` in config.json holds all
settings.

## Limits
{documents} The licence of the training text decides what the model may be used for; this card does not know it.
"""
SEPARATED = "The model was trained on documents that end with the token `</s>`, which starts a text too."
STREAM = "The model was trained on one stream of text: it knows no first and no last token of a text."


def model_card(source: RunFolder, loaded: LoadedRun, weights: Weights, *, separated: bool) -> str:
    """The card of a run's model, from its config and its metrics."""
    config, model = loaded.config, loaded.model
    built: Any = config.model
    as_lm: LMConfig = built if isinstance(built, LMConfig) else built.as_lm()
    return CARD.format(
        name=source.path.resolve().name,
        parameters=num_parameters(model),
        version=__version__,
        corpus=config.data.corpus,
        kind=type(built).__name__,
        blocks=_blocks(as_lm),
        dim=as_lm.dim,
        vocab_size=loaded.tokenizer.vocab_size,
        text="lossless" if config.data.tokenizer.lossless else "of text in NFKC, with spaces for line breaks",
        state="grows with the text" if _grows(as_lm) else "O(log n), plus the windows of attention",
        step=loaded.step,
        batch_size=config.train.batch_size,
        context=config.train.context,
        optimizer=config.train.optimizer,
        learning_rate=config.train.learning_rate,
        weights="lowest validation loss" if weights == "best" else "last step",
        loss=_validation_loss(source, loaded.step),
        seed=config.seed,
        documents=SEPARATED if separated else STREAM,
    )


def _blocks(config: LMConfig) -> str:
    """The blocks as the command line takes them."""
    blocks = " ".join(block_text(cast(Any, one)) for one in config.blocks)
    return f"`{blocks}`" + (f", {config.repeats} times" if config.repeats > 1 else "")


def _grows(config: LMConfig) -> bool:
    """Whether some attention reads all earlier tokens."""
    return any(isinstance(one, AttentionConfig) and one.window is None for one in config.blocks)


def _validation_loss(source: RunFolder, step: int) -> str:
    """The loss of the last validation up to a step."""
    found = [line for line in source.read_metrics() if line["kind"] == "valid" and line["step"] <= step]
    if not found:
        return "not measured"
    return f"{found[-1]['valid_loss']:.4f} nats per token, after {found[-1]['step']:,} steps"
