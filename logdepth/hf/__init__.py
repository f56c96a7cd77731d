"""Models of the library as Hugging Face models. Importing this package registers them with the Auto classes.

import logdepth.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")      # what `logdepth export RUN --to hf DIR` wrote
"""

from transformers import AutoConfig, AutoModelForCausalLM

from logdepth.hf.cache import LogDepthCache
from logdepth.hf.configuration import LogDepthConfig
from logdepth.hf.modeling import LogDepthForCausalLM

AutoConfig.register(LogDepthConfig.model_type, LogDepthConfig, exist_ok=True)
AutoModelForCausalLM.register(LogDepthConfig, LogDepthForCausalLM, exist_ok=True)

__all__ = ["LogDepthCache", "LogDepthConfig", "LogDepthForCausalLM"]
