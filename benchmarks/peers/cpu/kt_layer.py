"""The experts of KTransformers (PyPI: kt-kernel), for benchmarks/layer_table.py: `AMXBF16_MOE` on one
thread, behind the gate of torch_layer.py. Requests are those of that program, of bf16 and without
backward: it has nothing else in bfloat16.
"""
import os
import sys

# What the library writes to standard output would stand between the answers.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
from kt_kernel import kt_kernel_ext  # noqa: E402

import torch_layer  # noqa: E402
import worker  # noqa: E402


def one_thread():
    pool = kt_kernel_ext.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [1]
    return kt_kernel_ext.CPUInfer(pool)


CPU = one_thread()


def done(task):
    CPU.submit(task)
    CPU.sync()


def load(experts, shape):
    """The layer with packed copies of the weights."""
    on_gpu = torch.zeros(shape["experts"], dtype=torch.bool)
    config = kt_kernel_ext.moe.MOEConfig(shape["experts"], shape["topk"], shape["hidden"],
                                         shape["ffn"], on_gpu.data_ptr())
    config.layer_idx, config.pool, config.max_len = 0, CPU.backend_, shape["tokens"]
    halves = [gate_up.chunk(2) for gate_up, _ in experts]
    config.gate_projs = [[gate.data_ptr() for gate, _ in halves]]
    config.up_projs = [[up.data_ptr() for _, up in halves]]
    config.down_projs = [[down.data_ptr() for _, down in experts]]
    none = [[0] * len(experts)]
    config.gate_scales = config.up_scales = config.down_scales = none
    layer = kt_kernel_ext.moe.AMXBF16_MOE(config)
    order = torch.arange(shape["experts"])
    done(layer.load_weights_task(order.data_ptr()))
    return layer, on_gpu  # the layer reads the mask in every call


def prepare(shape):
    if shape["backward"] or shape["dtype"] != "bf16":
        raise ValueError("forward of bf16 alone")
    torch.manual_seed(0)
    h, f, topk = shape["hidden"], shape["ffn"], shape["topk"]

    def make(*sizes, scale=1.0):
        return (torch.randn(*sizes) * scale).to(torch.bfloat16)

    x, router = make(shape["tokens"], h), make(shape["experts"], h, scale=h ** -0.5)
    experts = [(make(2 * f, h, scale=h ** -0.5), make(h, f, scale=f ** -0.5))
               for _ in range(shape["experts"])]
    layer, mask = load(experts, shape)
    tokens, y = torch.tensor([shape["tokens"]], dtype=torch.int32), torch.empty_like(x)

    def call():
        weights, ids = torch_layer.route(x, router, topk)
        weights = weights.float()
        done(layer.forward_task(tokens.data_ptr(), topk, ids.data_ptr(), weights.data_ptr(),
                                x.data_ptr(), y.data_ptr(), False))
        return y, ids, None, mask

    torch_layer.check("kt-kernel", call()[:3], x, None, router, experts, torch_layer.BOUND["bf16"])
    return {"experts": call}


if __name__ == "__main__":
    worker.serve(prepare)
