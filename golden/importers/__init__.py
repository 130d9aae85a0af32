"""Reading the dumps of other tools: msprobe, SGLang's dumper, Hugging Face's model debugger."""
