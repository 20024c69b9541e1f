"""Tool call formats in which the arguments are XML-like elements."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from .xml_calls import XMLFormat

QWEN3_CODER = XMLFormat(
    parsers=("qwen3_coder", "qwen3_xml", "mimo", "step3p5"),
    template_markers=("<tool_call>", "<function="),
    start_markers=("<tool_call>", "<function="),
    end_markers=("</tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>"),
    name_start="<function=",
    name_end=">",
    parameter=("<parameter=", ">"),
    value_end="</parameter>",
    close="</function>",
    trim_newlines=True,
    call_start=("<tool_call>\n<function=", ">\n"),
    call_end="</function>\n</tool_call>",
    separator="\n",
)
"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Step 3.5,
Nemotron 3."""

SEED_OSS = replace(
    QWEN3_CODER,
    parsers=("seed_oss",),
    template_markers=("<seed:tool_call>",),
    start_markers=("<seed:tool_call>",),
    end_markers=("</seed:tool_call>",),
    marker_tokens=("<seed:tool_call>", "</seed:tool_call>"),
    trim_newlines=False,
    call_start=("<seed:tool_call>\n<function=", ">\n"),
    call_end="</function>\n</seed:tool_call>",
)
"""Same as ``QWEN3_CODER``, but in ``<seed:tool_call>`` and without line breaks around values: Seed-OSS."""

MINIMAX_M2 = XMLFormat(
    parsers=("minimax_m2", "minimax-m2"),
    template_markers=("minimax:tool_call",),
    start_markers=("<minimax:tool_call>",),
    end_markers=("</minimax:tool_call>",),
    marker_tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    name_start='<invoke name="',
    name_end='">',
    parameter=('<parameter name="', '">'),
    value_end="</parameter>",
    close="</invoke>",
    prefix="<minimax:tool_call>\n",
    call_start=('<invoke name="', '">\n'),
    call_end="</invoke>",
    separator="\n",
    suffix="\n</minimax:tool_call>",
)
"""``<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter></invoke> … </minimax:tool_call>``:
MiniMax-M2."""

GLM47 = XMLFormat(
    parsers=("glm47", "glm45", "glm", "poolside_v1", "ling3", "spark25"),
    template_markers=("<tool_call>", "</arg_key><arg_value>"),
    excluded_markers=("<tool_sep>",),  # a marker of Hunyuan 3
    start_markers=("<tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    parameter=("<arg_key>", "</arg_key>"),
    value_start="<arg_value>",
    value_end="</arg_value>",
    close="</tool_call>",
    line="",
    call_start=("<tool_call>", ""),
    call_end="</tool_call>",
)
"""``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.7."""

GLM45 = replace(
    GLM47,
    template_markers=("<tool_call>", "<arg_key>"),
    line="\n",
    call_start=("<tool_call>", "\n"),
    separator="\n",
)
"""Same as ``GLM47``, but each element is on a line: GLM-4.5 and 4.6, Laguna, Ling 3, Spark 2.5. Both parsers read both
formats."""

LONGCAT_XML = replace(
    GLM45,
    parsers=("longcat",),
    template_markers=("<longcat_tool_call>", "<longcat_arg_key>"),
    excluded_markers=(),
    start_markers=("<longcat_tool_call>",),
    marker_tokens=(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
    parameter=("<longcat_arg_key>", "</longcat_arg_key>"),
    value_start="<longcat_arg_value>",
    value_end="</longcat_arg_value>",
    close="</longcat_tool_call>",
    call_start=("<longcat_tool_call>", "\n"),
    call_end="</longcat_tool_call>",
)
"""Same as ``GLM45``, with other names of the elements: LongCat-Flash-Lite and LongCat 2."""

HY_V3 = XMLFormat(
    parsers=("hy_v3",),
    template_markers=("<tool_sep>", "<arg_key>"),
    start_markers=("<tool_calls>", "<tool_call>"),
    end_markers=("</tool_calls>",),
    marker_tokens=(
        "<tool_calls>",
        "</tool_calls>",
        "<tool_call>",
        "</tool_call>",
        "<tool_sep>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    name_start="<tool_call>",
    name_end="<tool_sep>",
    parameter=("<arg_key>", "</arg_key>"),
    value_start="<arg_value>",
    value_end="</arg_value>",
    close="</tool_call>",
    prefix="<tool_calls>\n",
    call_start=("<tool_call>", "<tool_sep>\n"),
    call_end="</tool_call>",
    separator="\n",
    suffix="\n</tool_calls>",
)
"""``<tool_calls><tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call> …
</tool_calls>``: Hunyuan 3 (preview)."""


def _with_suffix(form: XMLFormat, suffix: str) -> XMLFormat:
    """Return a format in which each token ends with ``suffix`` before its ``>``."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return value.replace(">", f"{suffix}>") if isinstance(value, str) else value

    kept = ("parsers", "excluded_markers", "call_id")
    return replace(
        form, **{each.name: changed(getattr(form, each.name)) for each in fields(form) if each.name not in kept}
    )


HY_V3_OPENSOURCE = replace(_with_suffix(HY_V3, ":opensource"), template_markers=("<tool_sep", ":opensource"))
"""Same as ``HY_V3``, with ``<tool_call:opensource>`` and so on: Hunyuan 3."""

K2_HORIZON = XMLFormat(
    parsers=("k2_horizon",),
    template_markers=("<ifm|tool_call>",),
    start_markers=("<ifm|tool_calls>", "<ifm|tool_call>"),
    end_markers=("</ifm|tool_calls>",),
    marker_tokens=(
        "<ifm|tool_calls>",
        "</ifm|tool_calls>",
        "<ifm|tool_call>",
        "</ifm|tool_call>",
        "<ifm|arg_key>",
        "</ifm|arg_key>",
        "<ifm|arg_value>",
        "</ifm|arg_value>",
    ),
    name_start="<ifm|tool_call>",
    parameter=("<ifm|arg_key>", "</ifm|arg_key>"),
    value_start="<ifm|arg_value>",
    value_end="</ifm|arg_value>",
    close="</ifm|tool_call>",
    line="",
    prefix="<ifm|tool_calls>",
    call_start=("<ifm|tool_call>", ""),
    call_end="</ifm|tool_call>",
    suffix="</ifm|tool_calls>",
)
"""``<ifm|tool_call>name<ifm|arg_key>key</ifm|arg_key><ifm|arg_value>value</ifm|arg_value></ifm|tool_call>`` for each
call, in ``<ifm|tool_calls>``: K2 Horizon."""

DEEPSEEK_V32 = XMLFormat(
    parsers=("deepseek_v32", "deepseekv32"),
    template_markers=("｜DSML｜", "function_calls>"),
    start_markers=("<｜DSML｜function_calls>",),
    end_markers=("</｜DSML｜function_calls>",),
    marker_tokens=("｜DSML｜",),
    name_start='<｜DSML｜invoke name="',
    name_end='">',
    parameter=('<｜DSML｜parameter name="', '"'),
    kinds=(("string", ' string="true">'), ("", ' string="false">')),
    kind_end=">",
    value_end="</｜DSML｜parameter>",
    close="</｜DSML｜invoke>",
    prefix="<｜DSML｜function_calls>\n",
    call_start=('<｜DSML｜invoke name="', '">\n'),
    call_end="</｜DSML｜invoke>",
    separator="\n",
    suffix="\n</｜DSML｜function_calls>",
)
"""``<｜DSML｜invoke name="…"><｜DSML｜parameter name="key" string="true">…</｜DSML｜parameter></｜DSML｜invoke>`` for
each call, in ``<｜DSML｜function_calls>``: DeepSeek V3.2."""

DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    parsers=("deepseek_v4", "deepseekv4"),
    template_markers=("｜DSML｜", "tool_calls>"),
    start_markers=("<｜DSML｜tool_calls>",),
    end_markers=("</｜DSML｜tool_calls>",),
    prefix="<｜DSML｜tool_calls>\n",
    suffix="\n</｜DSML｜tool_calls>",
)
"""Same as ``DEEPSEEK_V32``, in ``<｜DSML｜tool_calls>``: DeepSeek V4."""

GIGACHAT35 = replace(
    DEEPSEEK_V4,
    parsers=("gigachat35",),
    template_markers=("｜GCML｜",),
    start_markers=("<｜GCML｜tool_calls>",),
    end_markers=("</｜GCML｜tool_calls>",),
    marker_tokens=("｜GCML｜",),
    name_start='<｜GCML｜invoke name="',
    parameter=('<｜GCML｜parameter name="', '"'),
    value_end="</｜GCML｜parameter>",
    close="</｜GCML｜invoke>",
    prefix="<｜GCML｜tool_calls>\n",
    call_start=('<｜GCML｜invoke name="', '">\n'),
    call_end="</｜GCML｜invoke>",
    suffix="\n</｜GCML｜tool_calls>",
)
"""Same as ``DEEPSEEK_V4``, with ``GCML`` instead of ``DSML``: GigaChat 3.5."""

KIMI_K3 = XMLFormat(
    parsers=("kimi_k3",),
    template_markers=("<|open|>", "<|sep|>"),
    start_markers=("<|open|>tools<|sep|>", '<|open|>call tool="'),
    end_markers=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
    marker_tokens=("<|open|>", "<|close|>", "<|sep|>"),
    name_start='<|open|>call tool="',
    name_end='"',
    parameter=('<|open|>argument key="', '"'),
    kinds=tuple(
        (kind, f' type="{kind}"<|sep|>') for kind in ("string", "number", "boolean", "null", "object", "array")
    ),
    kind_end="<|sep|>",
    escaped_keys=True,
    value_end="<|close|>argument<|sep|>",
    value_stop="<|close|>",
    close="<|close|>call<|sep|>",
    line="",
    prefix="<|open|>tools<|sep|>",
    call_start=('<|open|>call tool="', '" index="1"<|sep|>'),
    call_end="<|close|>call<|sep|>",
    suffix="<|close|>tools<|sep|>",
)
"""``<|open|>tools<|sep|><|open|>call tool="name" index="1"<|sep|><|open|>argument key="key" type="string"<|sep|>value
<|close|>argument<|sep|><|close|>call<|sep|> … <|close|>tools<|sep|>``: Kimi-K3."""

STEP3 = XMLFormat(
    parsers=("step3",),
    template_markers=("steptml:invoke",),
    start_markers=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>"),
    end_markers=("<｜tool_call_end｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_calls_end｜>"),
    marker_tokens=(
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
    ),
    name_start='<steptml:invoke name="',
    name_lead="<｜tool_call_begin｜>function<｜tool_sep｜>",
    name_end='">',
    parameter=('<steptml:parameter name="', '">'),
    value_end="</steptml:parameter>",
    close="</steptml:invoke>",
    prefix="<｜tool_calls_begin｜>\n",
    call_start=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">\n'),
    call_end="</steptml:invoke><｜tool_call_end｜>",
    separator="\n",
    suffix="\n<｜tool_calls_end｜>",
)
"""``<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="…"><steptml:parameter name="key">value
</steptml:parameter></steptml:invoke><｜tool_call_end｜>`` for each call, between ``<｜tool_calls_begin｜>`` and
``<｜tool_calls_end｜>``: Step 3."""

SOLAR_OPEN2 = XMLFormat(
    parsers=("solar_open2",),
    template_markers=("<|tool_arg:start|>",),
    start_markers=("<|tool_call:start|>",),
    marker_tokens=(
        "<|tool_call:start|>",
        "<|tool_arg:start|>",
        "<|tool_arg:value|>",
        "<|tool_arg:end|>",
        "<|tool_call:end|>",
    ),
    parameter=("<|tool_arg:start|>", "<|tool_arg:value|>"),
    value_end="<|tool_arg:end|>",
    close="<|tool_call:end|>",
    call_start=("<|tool_call:start|>", "\n"),
    call_end="<|tool_call:end|>",
    separator="\n",
)
"""``<|tool_call:start|>name<|tool_arg:start|>key<|tool_arg:value|>value<|tool_arg:end|><|tool_call:end|>`` for each
call: Solar Open 2."""

MINICPM5 = XMLFormat(
    parsers=("minicpm5",),
    template_markers=("<function name=", "<param name="),
    start_markers=('<function name="',),
    marker_tokens=(),
    name_start='<function name="',
    name_end='">',
    parameter=('<param name="', '">'),
    value_end="</param>",
    cdata=True,
    close="</function>",
    line="",
    call_start=('<function name="', '">'),
    call_end="</function>",
    separator="\n",
)
"""``<function name="…"><param name="key">value</param></function>`` for each call, with values in ``<![CDATA[…]]>`` as
needed: MiniCPM 5."""

DOTS = replace(
    MINIMAX_M2,
    parsers=("dots",),
    template_markers=("<dots_function_call>",),
    start_markers=("<dots_function_call>",),
    end_markers=("</dots_function_call>",),
    marker_tokens=("<dots_function_call>", "</dots_function_call>"),
    prefix="<dots_function_call>\n",
    suffix="\n</dots_function_call>",
)
"""Same as ``MINIMAX_M2``, in ``<dots_function_call>``: dots."""

FORMATS = (
    QWEN3_CODER,
    SEED_OSS,
    MINIMAX_M2,
    GLM47,
    GLM45,
    LONGCAT_XML,
    HY_V3,
    HY_V3_OPENSOURCE,
    K2_HORIZON,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    GIGACHAT35,
    KIMI_K3,
    STEP3,
    SOLAR_OPEN2,
    MINICPM5,
    DOTS,
)
