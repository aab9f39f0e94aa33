"""Every kind of vocabulary file that models come with, read into one kind of tokenizer.

``load.py`` finds the file; ``ranks.py`` reads tiktoken's files and Mistral's tekken.json, ``sentencepiece.py`` with
``spm_file.py`` Google's tokenizer.model, ``merges.py`` GPT-2's vocab.json and merges.txt.  All give a ``Tokenizer`` of
the ``tokenizers`` library, so that guarding, streaming and threads are the same whatever the file.
Knows nothing about chats.
"""
