"""Chat templates and small helpers of the tests of assistant masks."""

import numpy as np

from train.chat import ChatFormat, Sample
from train.conversations import Conversation

CHATML = """\
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The logic of Qwen3's template: thinking is taken out of turns before the last user message, the
# last turn always has a thinking block, tool results are grouped into one user turn.
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for m in messages[::-1] %}
  {%- if not ns.found and m.role == 'user' %}
    {%- set ns.found = true %}{%- set ns.last = messages|length - 1 - loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set content = m.content %}{%- set reasoning = '' %}
    {%- if '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
      {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else %}{{- content }}{%- endif %}
    {%- for call in m.tool_calls or [] %}
      {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
      {{- '<|im_start|>user' }}
    {%- endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
  {%- endif %}
{%- endif %}"""

TRIMS = CHATML.replace("m.content", "(m.content | trim)")  # as Llama 3 does
HEADER_ENDS_IN_A_SPACE = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
NO_END_OF_TURN = CHATML.replace("<|im_end|>", "")
REFUSES_TWO_USERS = (
    "{%- for m in messages %}{%- if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}" + CHATML
)
UPPER = CHATML.replace("m.content", "(m.content | upper)")

CORPUS = [
    "user assistant system the assistant said hello and the user asked why this is so",
    "<think>\nlet me see\n</think>\n\nthe answer is 42 because it is known to be so\n\n\n",
    "tool_call tool_response name arguments 0 1 2 3 4 5 6 7 8 9",
]


def talk(*turns: tuple[str, str], **extra) -> Conversation:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return Conversation("c", [{"role": names[r], "content": text} for r, text in turns], **extra)


def supervised(chat: ChatFormat, sample: Sample) -> list[str]:
    """The text of every masked-in run."""
    starts = np.flatnonzero(np.diff(sample.loss_mask, prepend=False) & sample.loss_mask)
    ends = np.flatnonzero(np.diff(sample.loss_mask, append=False) & sample.loss_mask) + 1
    return [
        chat.tokenizer.decode(sample.tokens[a:b], clean_up_tokenization_spaces=False)
        for a, b in zip(starts, ends, strict=True)
    ]
