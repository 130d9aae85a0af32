"""Faults in norms, activations and rotary embeddings."""

from __future__ import annotations

from benchmarks.ascend_faults.fault import Fault, Found, Linted, Place, Refused, kernel, modeling

QWEN3 = Place("tiny-qwen3")
V3 = Place("tiny-deepseek-v3")
V32 = Place("tiny-deepseek-v32", prompt=12 * "Once upon a time there was a little girl. ")
NEXT = Place("tiny-qwen3-next")
FIRST = r"^model\.layers\.0(\.|$)"

FAULTS = (
    Fault(
        "norm-epsilon-left-out",
        "npu_rms_norm's epsilon is 1e-6 unless it is given",
        QWEN3,
        (kernel("norm", "npu_rms_norm(hidden_states, weight, epsilon=eps)", "npu_rms_norm(hidden_states, weight)"),),
        Refused(("npu_rms_norm", "epsilon", "left out")),
    ),
    Fault(
        "add-norm-epsilon-left-out",
        "npu_add_rms_norm's epsilon is 1e-6 unless it is given",
        QWEN3,
        (
            kernel(
                "norm",
                "npu_add_rms_norm(hidden_states, residual, weight, epsilon=eps)",
                "npu_add_rms_norm(hidden_states, residual, weight)",
            ),
        ),
        Refused(("npu_add_rms_norm", "epsilon", "left out")),
    ),
    Fault(
        "norm-epsilon-of-the-cache-operator",
        "npu_kv_rmsnorm_rope_cache's default, 1e-5, in place of the config's 1e-6",
        V3,
        (
            kernel(
                "norm",
                "npu_rms_norm(hidden_states, weight, epsilon=eps)",
                "npu_rms_norm(hidden_states, weight, epsilon=1e-5)",
            ),
        ),
        Linted("epsilon"),
    ),
    Fault(
        "add-norm-results-exchanged",
        "npu_add_rms_norm gives the norm first and the sum third",
        QWEN3,
        (kernel("norm", "normed, _, total = torch_npu", "total, _, normed = torch_npu"),),
        Found(r"layers\.0", ("residual-missing",)),
        FIRST,
    ),
    Fault(
        "plain-norm-for-zero-centred-weight",
        "npu_rms_norm on a weight that is stored less one",
        NEXT,
        (kernel("norm", "npu_gemma_rms_norm(hidden_states.contiguous()", "npu_rms_norm(hidden_states.contiguous()"),),
        Found(r"norm", ("norm-zero-centred",)),
        FIRST,
    ),
    Fault(
        "gate-second",
        "npu_swiglu takes the gate from the first half",
        QWEN3,
        (
            kernel(
                "activation",
                "npu_swiglu(gate_up.contiguous(), dim=-1)",
                "npu_swiglu(gate_up.roll(gate_up.shape[-1] // 2, -1), dim=-1)",
            ),
        ),
        Found(r"layers\.0\.mlp$", ("gate-up-swapped",)),
        FIRST,
    ),
    Fault(
        "swiglu-not-contiguous",
        "npu_swiglu takes contiguous tensors alone",
        QWEN3,
        (
            kernel(
                "activation",
                "npu_swiglu(gate_up.contiguous(), dim=-1)",
                "npu_swiglu(gate_up.mT.contiguous().mT, dim=-1)",
            ),
        ),
        Refused(("npu_swiglu", "contiguous")),
    ),
    Fault(
        "halves-turned-as-neighbours",
        "rotary_mode: half for Qwen, interleave for neighbours",
        QWEN3,
        (
            kernel(
                "rope", '_turn(torch_npu, query, cos, sin, "half")', '_turn(torch_npu, query, cos, sin, "interleave")'
            ),
            kernel("rope", '_turn(torch_npu, key, cos, sin, "half")', '_turn(torch_npu, key, cos, sin, "interleave")'),
        ),
        Found(r"layers\.0\.self_attn$", ("rope-style",)),
        FIRST,
    ),
    Fault(
        "neighbours-turned-as-halves",
        "DeepSeek's pairs are neighbours, and must be made halves first",
        V3,
        (kernel("rope", "torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1) for t in tokens", "t for t in tokens"),),
        Found(r"layers\.0\.self_attn$", ("rope-style",)),
        FIRST,
    ),
    Fault(
        "sine-before-cosine",
        "npu_mla_prolog takes sines first, npu_rotary_mul cosines",
        QWEN3,
        (kernel("rope", "*halved, rotary_mode", "*halved[::-1], rotary_mode"),),
        Found(r"layers\.0\.self_attn$", ("rope-style",)),
        FIRST,
    ),
    Fault(
        "yarn-angles-out-of-range",
        "npu_rotary_mul documents cosines in [-1, 1], and YaRN's are longer",
        V3,
        (
            kernel("rope", "(0.5 * a).to(wide)", "a.to(wide)"),
            kernel("rope", "turned.mul_(2.0).to(dtype)", "turned.to(dtype)"),
        ),
        Refused(("npu_rotary_mul", "-1")),
    ),
    Fault(
        "indexer-turned-as-neighbours",
        "DeepSeek-V3.2's indexer turns halves, its attention neighbours (vllm-ascend #4641)",
        V32,
        (
            modeling(
                "return self.rope(query, key, cos, sin)",
                "size = cos.shape[-1]\n"
                "        def halves(t):\n"
                "            return torch.cat((t[..., :size:2], t[..., 1:size:2], t[..., size:]), dim=-1)\n"
                "        query, key = halves(query), halves(key)\n"
                "        return self.rope(query, key, cos, sin)",
            ),
        ),
        Found(r"layers\.0\.self_attn\.indexer$", ("rope-style",)),
        FIRST,
    ),
)
