"""Prompts made by rule, for more kinds of text than people's conversations have.

Each module yields the texts of one family: without end, in an order that its `random.Random`
decides. `scripts/make_prompts.py` writes them as conversations.
"""
