"""Lines as trainers print them, of values that a test chooses, and what is to be understood of them.

Each sample prints twelve rows: `n` counts from 0, `loss` falls from 5 to 3.9, and a step takes 0.25 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

ROWS: Final = 12
STEP_S: Final = 0.25


class Sample(NamedTuple):
    """How a trainer prints a row, and what it means."""

    text: Callable[[int, float], str]
    """Of row and loss."""
    step: Callable[[int], int] = lambda n: 10 * n + 10
    step_s: float | None = STEP_S
    """Seconds of a step; None where the log does not say, and 1 where it only says how many of something a second."""
    clock: bool = False
    """The clock of the lines says it, row by row."""
    head: str = ""
    """What comes before the rows."""
    is_slow: bool = False
    """Most of its lines fit no template."""


def clock(n: int, apart_s: float = 2.5) -> str:
    """HH:MM:SS,mmm of a row."""
    at_ms = round(n * apart_s * 1000)
    return f"10:{at_ms // 60000:02}:{at_ms // 1000 % 60:02},{at_ms % 1000:03}"


def bar(done: int, total: int, after: str = "") -> str:
    """A bar of tqdm, which overwrites the one before."""
    return f"\r{100 * done // total:3}%|##        | {done}/{total} [00:10<01:30,  4.00it/s{after}]"


SAMPLES: Final[dict[str, Sample]] = {
    "transformers Trainer": Sample(
        lambda n, loss: (
            f"{bar(10 * n + 10, 900)}\n{{'loss': {loss}, 'grad_norm': 1.5, 'learning_rate': 5e-05, "
            f"'epoch': {n / 90:.2f}}}\n"
        )
    ),
    "transformers Trainer 5": Sample(
        lambda n, loss: (
            f"{bar(10 * n + 10, 900)}\n{{'loss': '{loss}', 'grad_norm': '1.5', 'learning_rate': "
            f"'5e-05', 'epoch': '{n / 90:.2f}'}}\n"
        )
    ),
    "Trainer after other bars": Sample(
        lambda n, loss: f"{bar(10 * n + 10, 900)}\n{{'loss': {loss}, 'learning_rate': 5e-05, 'epoch': {n / 90:.2f}}}\n",
        head="".join(f"\rMap: {10 * k}%|#  | {k * 100}/1000 [00:00<00:01, 900.00 examples/s]" for k in range(11))
        + "\n",
    ),
    "Trainer with a bar for each step": Sample(
        lambda n, loss: "".join(bar(10 * n + k, 900) for k in range(1, 11)) + f"\n{{'loss': {loss}, 'epoch': 0.1}}\n"
    ),
    "Trainer without a bar": Sample(
        lambda n, loss: f"{{'loss': {loss}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': {n / 90:.2f}}}\n",
        step=lambda n: n + 1,
        step_s=None,
    ),
    "TRL": Sample(
        lambda n, loss: (
            f"{bar(n + 1, 90)}\n{{'loss': {loss}, 'rewards/chosen': 0.2, 'rewards/margins': 0.1, "
            f"'logps/chosen': -80.5, 'epoch': 0.1}}\n"
        ),
        step=lambda n: n + 1,
    ),
    "tqdm": Sample(lambda n, loss: bar(10 * n + 10, 900, f", loss={loss}")),
    "tqdm without a length": Sample(lambda n, loss: f"\r{10 * n + 10}it [00:12,  4.00it/s, loss={loss}]"),
    "slow tqdm": Sample(
        lambda n, loss: f"\rtraining:  1%|   | {n + 1}/90 [00:10<01:30, 12.50s/it, lr=1e-4, loss={loss}]",
        step=lambda n: n + 1,
        step_s=12.5,
    ),
    "Lightning": Sample(
        lambda n, loss: (
            f"\rEpoch {n // 4}:  10%|#   | {n % 4 + 1}/4 [00:10<00:30,  4.00it/s, v_num=3, "
            f"train_loss_step={loss}, train_loss_epoch=9.0]"
        ),
        step=lambda n: n + 1,
    ),
    "Lightning with a validation": Sample(
        lambda n, loss: (
            f"\rEpoch 0:  10%|#   | {n + 1}/40 [00:10<00:30,  4.00it/s, v_num=3, train_loss={loss}]"
            + (f"\rValidation DataLoader 0:  50%|#  | {n}/9 [00:00<00:01, 40.00it/s]" if n % 3 == 2 else "")
        ),
        step=lambda n: n + 1,
    ),
    "Megatron-LM": Sample(
        lambda n, loss: (
            f" [2025-05-06 {clock(n).replace(',', '.')}] iteration {10 * n + 10:8}/  500000 | "
            f"consumed samples: {n * 640:12} | elapsed time per iteration (ms): 250.0 | learning "
            f"rate: 6.000E-05 | global batch size:    64 | lm loss: {loss:.6E} | loss scale: 1.0 | "
            "grad norm: 0.713 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        )
    ),
    "Megatron-LM with other losses": Sample(
        lambda n, loss: (
            f" iteration {10 * n + 10:8}/  500000 | elapsed time per iteration (ms): 250.0 | "
            f"load_balancing_loss: 1.01E+00 | z_loss: 2E-02 | lm loss: {loss:.6E} | mtp_1 loss: "
            "6.0E+00 | loss scale: 1.0 |\n"
        )
    ),
    "NeMo": Sample(
        lambda n, loss: (
            f"Training epoch 0, iteration {10 * n + 10}/999 | lr: 2e-07 | global_batch_size: 32 | "
            f"global_step: {10 * n + 10} | reduced_train_loss: {loss} | train_step_timing in s: 0.25 "
            f"| consumed_samples: {n * 320}\n"
        )
    ),
    "NeMo 1": Sample(
        lambda n, loss: (
            f"\rEpoch 0: :   1%|1   | {10 * n + 10}/99999 [01:02<9:02:03, v_num=1, "
            f"reduced_train_loss={loss}, global_step={10.0 * n + 10}, consumed_samples={n * 64.0}, "
            "train_step_timing in s=0.25]"
        )
    ),
    "DeepSpeed": Sample(
        lambda n, loss: (
            f"[2025-05-06 {clock(n)}] [INFO] [logging.py:96:log_dist] [Rank 0] step={10 * n + 10}, "
            f"skipped=0, lr=[1e-05, 1e-05], mom=[[0.9, 0.95], [0.9, 0.95]]\nsteps: {10 * n + 10} "
            f"loss: {loss} iter time (s): 0.250 samples/sec: 128.000\n"
        )
    ),
    "GPT-NeoX": Sample(
        lambda n, loss: (
            f" samples/sec: 51.2 | iteration {10 * n + 10:8}/  320000 | elapsed time per iteration "
            "(ms): 250.0 | learning rate: 1.0E-04 | approx flops per GPU: 51.0TFLOPS | lm_loss: "
            f"{loss:.6E} | loss scale: 65536.0 | number of skipped iterations:   0 | number of nan "
            "iterations:   0 |\n"
        )
    ),
    "torchtitan": Sample(
        lambda n, loss: (
            f"[rank0]:[titan] 2025-05-06 {clock(n)} - root - INFO - \x1b[31mstep: {10 * n + 10:2}  "
            f"\x1b[32mloss: {loss:7.4f}  \x1b[33mmemory: 9.46GiB(64.99%)  \x1b[34mtps: 35,485  "
            "\x1b[35mmfu: 34.65%\x1b[39m\n"
        ),
        clock=True,
    ),
    "torchtune": Sample(
        lambda n, loss: f"\r1|{n + 1}|Loss: {loss}:   1%|   | {n + 1}/808 [00:25<5:29:42,  4.00it/s]",
        step=lambda n: n + 1,
    ),
    "torchtune file": Sample(
        lambda n, loss: f"Step {n + 1} | loss:{loss} lr:2e-05 tokens_per_second_per_gpu:1500.5 grad_norm:3.25\n",
        step=lambda n: n + 1,
        step_s=1.0,
    ),
    "nanoGPT": Sample(
        lambda n, loss: f"iter {10 * n + 10}: loss {loss:.4f}, time 250.00ms, mfu 31.20%\n",
        head="number of parameters: 123.59M\nstep 0: train loss 10.9, val loss 10.8\n",
    ),
    "nanochat": Sample(
        lambda n, loss: (
            f"step {n:05}/21400 (0.01%) | loss: {loss} | lrm: 1.00 | dt: 250.00ms | tok/sec: 500,100 "
            f"| mfu: 40.10 | total time: 0.{n}m\n"
        ),
        step=lambda n: n,
    ),
    "modded-nanogpt": Sample(
        lambda n, loss: f"step:{n + 1}/1750 train_loss:{loss} train_time:{250 * n + 250}ms step_avg:250.00ms\n",
        step=lambda n: n + 1,
    ),
    "llm.c": Sample(
        lambda n, loss: (
            f"step {n + 1:4}/1000 | loss {loss} (+0.10z)| norm 1.2500 (-0.30z)| lr 3.00e-04 | 250.00 "
            "ms | 42.6% bf16 MFU | 171541 tok/s\n"
        ),
        step=lambda n: n + 1,
    ),
    "mmcv": Sample(
        lambda n, loss: (
            f"2025-05-06 {clock(n)} - mmdet - INFO - Epoch [1][{10 * n + 10}/7330]\tlr: 1.0e-02, eta: "
            "1 day, 4:07:11, time: 0.250, data_time: 0.019, memory: 3904, loss_cls: 0.8, loss_bbox: "
            f"0.3, loss: {loss}, grad_norm: 2.5\n"
        )
    ),
    "mmcv over epochs": Sample(
        lambda n, loss: (
            f"2025-05-06 {clock(n)} - mmseg - INFO - Epoch "
            f"[{n // 4 + 1}][{10 * (n % 4) + 10}/45]\tlr: 1.0e-02, eta: 4:07:11, time: 0.250, "
            f"decode.loss_ce: 0.8, loss: {loss}\n"
        ),
        step=lambda n: 45 * (n // 4) + 10 * (n % 4) + 10,
    ),
    "mmengine": Sample(
        lambda n, loss: (
            f"05/06 {clock(n)[:8]} - mmengine - INFO - Epoch(train)  [1][{10 * n + 10:3}/7330]  lr: "
            "1.0e-03  eta: 12:34:56  time: 0.2500  data_time: 0.0123  memory: 3456  grad_norm: 9.8  "
            f"loss: {loss}  loss_cls: 0.9\n"
        )
    ),
    "mmengine by iterations": Sample(
        lambda n, loss: (
            f"2025/05/06 {clock(n)[:8]} - mmengine - INFO - Iter(train) [{10 * n + 10:6}/160000]  lr: "
            f"1.0e-03  eta: 12:34:56  time: 0.2500  memory: 3456  loss: {loss}  decode.acc_seg: 55.1\n"
        )
    ),
    "detectron2": Sample(
        lambda n, loss: (
            f"[05/06 {clock(n)[:8]} d2.utils.events]: \x1b[0m eta: 4:07:11  iter: {10 * n + 10}  "
            f"total_loss: {loss}  loss_cls: 0.8  loss_box_reg: 0.3  time: 0.2500  last_time: 0.2500  "
            "data_time: 0.0131  last_data_time: 0.0125   lr: 0.0005  max_mem: 3904M\n"
        )
    ),
    "timm": Sample(
        lambda n, loss: (
            f"Train: 0 [{10 * n + 10:4}/1251 (  3%)]  Loss: {loss:.3f} ({loss + 0.1:.3f})  Time: "
            "0.250s, 1024.00/s  (0.260s, 984.6/s)  LR: 1.000e-05  Data: 0.010 (0.013)\n"
        )
    ),
    "timm, older": Sample(
        lambda n, loss: (
            f"Train: 0 [{10 * n + 10:>4d}/1251 ({3:>3.0f}%)]  Loss:  {loss:>9.6f} ({6.9:>6.4f})  "
            f"Time: 0.250s, {1024.0:>7.2f}/s  (0.260s,  984.60/s)  LR: 1.000e-05  Data: 0.010 "
            "(0.013)\n"
        )
    ),
    "open_clip": Sample(
        lambda n, loss: (
            f"2025-05-06,{clock(n)[:8]} | INFO | Train Epoch: 0 [{256 * (10 * n + 1):>6}/640000 "
            f"({n}%)] Data (t): 0.157 Batch (t): 0.250, 1024.0/s, 1024.0/s/gpu LR: 0.000013 Logit "
            f"Scale: 14.350 Contrastive_loss: {loss} ({loss}) Loss: {loss} ({loss})\n"
        ),
        step=lambda n: 256 * (10 * n + 1),
    ),
    "PyTorch's ImageNet example": Sample(
        lambda n, loss: (
            f"Epoch: [0][{10 * n + 10:5}/5005]\tTime  0.250 ( 0.812)\tData  0.000 ( 0.412)\tLoss "
            f"{loss:.4e} ({loss:.4e})\tAcc@1   0.00 (  0.12)\tAcc@5   0.78 (  0.60)\n"
        )
    ),
    "PyTorch's MNIST example": Sample(
        lambda n, loss: f"Train Epoch: 1 [{640 * n}/60000 ({n}%)]\tLoss: {loss:.6f}\n",
        step=lambda n: 640 * n,
        step_s=None,
    ),
    "torchvision references": Sample(
        lambda n, loss: (
            f"Epoch: [0]  [{10 * n + 10:4}/1250]  eta: 0:12:34  lr: 0.000001  img/s: 512.3  loss: "
            f"{loss:.4f} (6.9912)  acc1: 0.0 (0.2)  time: 0.2500  data: 0.0003  max mem: 8123\n"
        )
    ),
    "fairseq JSON": Sample(
        lambda n, loss: (
            f'2025-05-06 {clock(n)[:8]} | INFO | train_inner | {{"epoch": 1, "update": {n / 90:.3f}, '
            f'"loss": "{loss}", "nll_loss": "{loss + 1}", "ppl": "8.1", "wps": "9001.2", "ups": "4", '
            f'"wpb": "2048", "num_updates": "{10 * n + 10}", "lr": "1e-05", "gnorm": "1.9", '
            f'"train_wall": "9", "wall": "{n * 3 + 2}"}}\n'
        )
    ),
    "fairseq": Sample(
        lambda n, loss: (
            f"2025-05-06 {clock(n)[:8]} | INFO | train_inner | epoch 001:  {10 * n + 10} / 1102 "
            f"loss={loss}, nll_loss={loss + 1}, ppl=8.1, wps=9001.2, ups=4, wpb=2048, bsz=64, "
            f"num_updates={10 * n + 10}, lr=1e-05, gnorm=1.9, train_wall=9, wall={n * 3 + 2}\n"
        )
    ),
    "Keras 2": Sample(
        lambda n, loss: f"\r {n + 1}/234 [>.............] - ETA: 1:30 - loss: {loss} - accuracy: 0.6010",
        step=lambda n: n + 1,
        step_s=None,
        head="Epoch 1/10\n",
    ),
    "Keras 3": Sample(
        lambda n, loss: (
            "\x08" * 60
            + (
                f"\r\x1b[1m {n + 1}/234\x1b[0m \x1b[37m━━━━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m58s\x1b[0m "
                f"250ms/step - accuracy: 0.6010 - loss: {loss}"
            )
        ),
        step=lambda n: n + 1,
        head="Epoch 1/10\n",
    ),
    "Keras by epoch": Sample(
        lambda n, loss: (
            f"Epoch {n + 1}/90\n234/234 - 58s - loss: {loss} - accuracy: 0.6010 - val_loss: 6.1 - "
            "val_accuracy: 0.5 - 58s/epoch - 250ms/step\n"
        ),
        step=lambda n: n + 1,
        step_s=58.0,
    ),
    "TF-Slim": Sample(
        lambda n, loss: f"INFO:tensorflow:global step {10 * n + 10}: loss = {loss:.4f} (0.250 sec/step)\n"
    ),
    "TF Estimator": Sample(
        lambda n, loss: (
            f"INFO:tensorflow:global_step/sec: 4\nINFO:tensorflow:loss = {loss}, step = {100 * n + 100} (25.000 sec)\n"
        ),
        step=lambda n: 100 * n + 100,
    ),
    "TF Object Detection": Sample(
        lambda n, loss: (
            f"INFO:tensorflow:Step {100 * n + 100} per-step time 0.250s loss={loss:.3f}\nI0506 "
            f"10:00:00.123456 140 model_lib_v2.py:700] Step {100 * n + 100} per-step time 0.250s "
            f"loss={loss:.3f}\n"
        ),
        step=lambda n: 100 * n + 100,
    ),
    "MaxText": Sample(
        lambda n, loss: (
            f"completed step: {n}, seconds: 0.250, TFLOP/s/device: 101.5, Tokens/s/device: 8192.1, "
            f"total_weights: 65536, loss: {loss}\n"
        ),
        step=lambda n: n,
    ),
    "Paxml": Sample(
        lambda n, loss: (
            "I0506 10:00:00.123456 140123456 trainer_lib.py:123] [PAX STATUS]: step_i: "
            f"{10 * n + 10}, training loss: {loss}, steps/sec 4.0\n"
        )
    ),
    "EasyLM": Sample(
        lambda n, loss: (
            f"{{'accuracy': 0.25, 'gradient_norm': 1.5, 'learning_rate': 1e-05, 'loss': {loss}, "
            f"'param_norm': 900.5, 'step': {10 * n + 10}}}\n"
        ),
        step_s=None,
    ),
    "ms-swift": Sample(
        lambda n, loss: (
            f'{{"loss": {loss}, "grad_norm": 1.5, "learning_rate": 4.3e-05, "epoch": 0.01, '
            f'"global_step/max_steps": "{10 * n + 10}/2161", "percentage": "0.05%", "elapsed_time": '
            f'"{n}m 2s", "remaining_time": "21h 6m 44s", "memory(GiB)": 87.61, "train_speed(iter/s)": '
            f"4.0}}\n"
        )
    ),
    "LLaMA-Factory": Sample(
        lambda n, loss: (
            f'{{"current_steps": {10 * n + 10}, "total_steps": 900, "loss": {loss}, "lr": 5e-05, '
            f'"epoch": 0.1, "percentage": 1.1, "elapsed_time": "0:00:{n * 2 + 10}", "remaining_time": '
            f'"0:10:01"}}\n'
        ),
        step_s=None,
    ),
    "Composer": Sample(
        lambda n, loss: (
            f"[epoch=1][batch={n + 1}/4800]:\n\t Train time/epoch: 0\n\t Train time/batch: {n}\n\t "
            f"Train loss/train/total: {loss}\n\t Train metrics/train/LanguageCrossEntropy: {loss}\n\t "
            "Train lr-DecoupledAdamW/group0: 0.0002\n"
        ),
        step=lambda n: n + 1,
        step_s=None,
    ),
    "OLMo": Sample(
        lambda n, loss: (
            "2025-05-06 "
            f"{clock(n)[:8]}.123\thost:0\tolmo.train:967\tINFO\t[step={10 * n + 10}/477000]\n    "
            f"train/CrossEntropyLoss={loss}\n    train/Perplexity=90.5\n    "
            "throughput/total_tokens=41943040\n    throughput/device/batches_per_second=4.0\n"
        )
    ),
    "Nanotron": Sample(
        lambda n, loss: (
            f"05/06/2025 {clock(n)[:8]} [INFO|DP=0|PP=0|TP=0]: iteration: {10 * n + 10} / 1000 | "
            "consumed_tokens: 81.9K | elapsed_time_per_iteration_ms: 250 | tokens_per_sec: 16.4K | "
            f"global_batch_size: 16 | lm_loss: {loss} | lr: 0.0003 | grad_norm: 0.5\n"
        )
    ),
    "Levanter": Sample(
        lambda n, loss: f"\r\x1b[Ktrain:   1%|   | {10 * n + 10}/9999 [00:25<40:00,  4.00it/s, loss={loss}]"
    ),
    "Accelerate": Sample(
        lambda n, loss: f"\rSteps:   1%|1   | {10 * n + 10}/9999 [00:25<40:00,  4.00it/s, lr=1e-05, step_loss={loss}]"
    ),
    "kohya": Sample(
        lambda n, loss: f"\rsteps:   1%|1   | {10 * n + 10}/9999 [00:25<40:00,  4.00it/s, avr_loss={loss}]"
    ),
    "Ultralytics": Sample(
        lambda n, loss: (
            "\n      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n      "
            f"{n + 1}/100      2.3G     {loss}      2.80      1.50        183        640: "
            "100%|##########| 8/8 [00:02<00:00,  4.00it/s]\n"
        ),
        step=lambda n: n + 1,
        step_s=None,
    ),
    "fastai": Sample(
        lambda n, loss: f"{n}         {loss:.6f}    3.500000    0.250000  00:12     \n",
        step=lambda n: n,
        step_s=None,
        head="epoch     train_loss  valid_loss  accuracy  time    \n",
    ),
    "a table in a notebook": Sample(
        lambda n, loss: f"{10 * n + 10}\t{loss:.6f}\n", head="Step\tTraining Loss\n", step_s=None
    ),
    "a table with bars": Sample(
        lambda n, loss: f"| {10 * n + 10:6} | {loss:8.4f} | 0.250 |\n",
        head="|  step  |   loss   | step_time |\n|--------|----------|-----------|\n",
    ),
    "SpeechBrain": Sample(
        lambda n, loss: f"\r  1%|1   | {n + 1}/742 [00:04<03:05,  4.00it/s, train_loss={loss}]", step=lambda n: n + 1
    ),
    "k2 icefall": Sample(
        lambda n, loss: (
            f"2025-05-06 {clock(n)} INFO [train.py:876] (0/8) Epoch 1, batch {50 * n}, "
            f"loss[loss={loss}, simple_loss=0.8, over 4000.00 frames. ], tot_loss[loss=9.5, over "
            "90000.00 frames. ], batch size: 17, lr: 3.00e-03\n"
        ),
        step=lambda n: 50 * n,
        step_s=0.05,
        clock=True,
    ),
    "YOLOX": Sample(
        lambda n, loss: (
            f"2025-05-06 {clock(n)[:8]} | INFO     | yolox.core.trainer:261 - epoch: 1/300, iter: "
            f"{10 * n + 10}/1849, mem: 9001Mb, iter_time: 0.250s, data_time: 0.002s, total_loss: "
            f"{loss}, iou_loss: 4.5, l1_loss: 0.0, lr: 1.0e-04, size: 640, ETA: 5 days, 1:02:03\n"
        )
    ),
    "PaddlePaddle": Sample(
        lambda n, loss: (
            f"[2025-05-06 {clock(n)}] [    INFO] - loss: {loss}, learning_rate: 3e-05, global_step: "
            f"{10 * n + 10}, interval_runtime: 2.5, interval_samples_per_second: 51.2, "
            "interval_steps_per_second: 4.0, epoch: 0.1\n"
        )
    ),
    "PaddleDetection": Sample(
        lambda n, loss: (
            f"[05/06 {clock(n)[:8]}] ppdet.engine INFO: Epoch: [0] [{10 * n + 10:4}/7329] "
            f"learning_rate: 0.0001 loss: {loss} loss_cls: 0.8 eta: 5 days, 1:02:03 batch_cost: 0.250 "
            "data_cost: 0.0012 ips: 8.1 images/s\n"
        )
    ),
    "verl": Sample(
        lambda n, loss: (
            f"step:{n + 1} - actor/entropy_loss:0.4 - actor/pg_loss:{loss} - actor/grad_norm:0.5 - "
            "perf/time_per_step:0.25 - timing_s/gen:10.0 - perf/throughput:900.1\n"
        ),
        step=lambda n: n + 1,
    ),
    "OpenRLHF": Sample(
        lambda n, loss: (
            f"\rTrain step of epoch 0:  1%|#  | {n + 1}/400 [00:10<01:30,  4.00it/s, gpt_loss={loss}, loss_mean=5.1]"
        ),
        step=lambda n: n + 1,
    ),
    "LitGPT": Sample(
        lambda n, loss: (
            f"Epoch 1 | iter {10 * n + 10} step {5 * n + 5} | loss train: {loss:.3f}, val: n/a | "
            "iter time: 250.00 ms (step) remaining time: 1 day, 0:01:02\n"
        )
    ),
    "DETR": Sample(
        lambda n, loss: (
            f"Epoch: [0]  [{10 * n + 10:>5}/7393]  eta: 5:01:02  lr: 0.000100  class_error: 90.1  loss: {loss} (5.9)  "
            "loss_ce: 1.5 (1.7)  loss_ce_unscaled: 1.5 (1.6)  time: 0.2500  data: 0.0103  max mem: 5103\n"
        )
    ),
    "DINOv2": Sample(
        lambda n, loss: (
            f"I20250506 10:00:00 140 dinov2 helpers.py:103] Training  [{10 * n + 10:>5}/125000]  eta: 1 day, 0:00:01  "
            f"total_loss: {loss} (11.2)  dino_local_crops_loss: 8.1 (8.1)  time: 0.250000  data: 0.001\n"
        )
    ),
    "Swin": Sample(
        lambda n, loss: (
            f"[2025-05-06 10:00:00 tiny] (main.py 200): INFO Train: [0/300][{10 * n + 10}/1251]\teta 0:10:01 "
            f"lr 0.000001\ttime 0.2500 (0.3012)\tloss {loss:.4f} (6.9)\tgrad_norm 1.5 (inf)\tmem 9000MB\n"
        )
    ),
    "Caffe": Sample(
        lambda n, loss: (
            f"I0506 10:00:00.123456 140 solver.cpp:218] Iteration {10 * n + 10} (4 iter/s, 5s/9 iters), loss = {loss}\n"
            "I0506 10:00:00.123456 140 solver.cpp:237]     Train net output #0: loss_bbox = 0.2 (* 1 = 0.2 loss)\n"
        )
    ),
    "OpenNMT": Sample(
        lambda n, loss: (
            f"[2025-05-06 10:00:00,123 INFO] Step {50 * n + 50}/100000; acc: 3.5; ppl: 90.1; xent: {loss}; "
            f"lr: 0.00001; bsz: 900/900/9; {12.5 * n + 12.5} sec;\n"
        ),
        step=lambda n: 50 * n + 50,
        clock=True,
    ),
    "NeMo RL": Sample(
        lambda n, loss: (
            f"========== Step {n + 1}/900 ==========\n  \u2022 Loss: {loss:.4f}\n  \u2022 Total step time: 0.25s\n"
        ),
        step=lambda n: n + 1,
    ),
    "Stable-Baselines3": Sample(
        lambda n, loss: (
            f"| time/                   |      |\n|    iterations           | {n + 1} |\n"
            f"| train/                  |      |\n|    approx_kl            | 0.01 |\n|    loss   | {loss} |\n"
        ),
        step=lambda n: n + 1,
        step_s=None,
    ),
    "PyTorch's word language model": Sample(
        lambda n, loss: (
            f"| epoch   1 | {10 * n + 10:5d}/ 2983 batches | lr 20.00 | ms/batch 250.00 | loss {loss:5.2f} | ppl 14.4\n"
        )
    ),
    "MMDetection's JSON": Sample(
        lambda n, loss: (
            f'{{"mode": "train", "epoch": {1 + n // 6}, "iter": {50 * (n % 6 + 1)}, "lr": 0.01, "data_time": 0.01, '
            f'"loss_cls": 0.5, "loss": {loss}, "time": 0.25}}\n'
            + ('{"mode": "val", "epoch": 1, "iter": 625, "bbox_mAP": 0.3}\n' if n == 5 else "")
        ),
        step=lambda n: 50 * n + 50,
    ),
    "a table with tabs and padded names": Sample(
        lambda n, loss: f"{10 * n + 10}\t{loss}\t1e-4\t0.25\n", head="step\t loss \t lr\ttime/step (s)\n"
    ),
    "step, loss and time in lines of their own": Sample(
        lambda n, loss: f"Step: {10 * n + 10}\nLoss: {loss}\nTime per step: 0.25 s\n\n"
    ),
    "wandb's summary lines": Sample(
        lambda n, loss: (
            f"{{'train/loss': {loss}, 'train/global_step': {10 * n + 10}, '_runtime': "
            f"{2.5 * n + 9.5}, '_timestamp': {1746525600.5 + 2.5 * n}}}\n"
        ),
        clock=True,
    ),
    "a logger of JSON": Sample(
        lambda n, loss: (
            f'{{"time": "2025-05-06T{clock(n).replace(",", ".")}Z", "level": "INFO", "message": '
            f'"step={10 * n + 10} loss={loss} dt=0.25s"}}\n'
        )
    ),
    "docker's JSON file": Sample(
        lambda n, loss: (
            f'{{"log":"step {10 * n + 10} loss {loss} step_time '
            f'0.25\\n","stream":"stderr","time":"2025-05-06T10:00:00Z"}}\n'
        )
    ),
    "JSON with objects in it": Sample(
        lambda n, loss: (
            f'{{"step": {10 * n + 10}, "train": {{"loss": {loss}, "lr": 1e-4}}, "eval": {{"loss": '
            f'9.0}}, "perf": {{"step_time_s": 0.25}}}}\n'
        )
    ),
    "Kubernetes": Sample(
        lambda n, loss: (
            f"2025-05-06T{clock(n).replace(',', '.')}123456Z stdout F step {10 * n + 10} | loss "
            f"{loss} | sec/step 0.25\n"
        )
    ),
    "srun --label": Sample(
        lambda n, loss: "".join(
            f"{rank}: step {10 * n + 10} loss {loss + 3 * rank} sec_per_step 0.25\n" for rank in (0, 1)
        )
    ),
    "a loop of one's own": Sample(
        lambda n, loss: f"Epoch 1, Iteration {10 * n + 10}: Loss = {loss}, learning rate = 1e-4, took 250ms\n"
    ),
    "elapsed since the start": Sample(
        lambda n, loss: f"step {10 * n + 10} loss {loss} elapsed {2.5 * n + 3.25:.2f}s\n", clock=True
    ),
    "each line twice": Sample(lambda n, loss: f"step {10 * n + 10}: loss {loss}, step time 0.25 s\n" * 2),
    "loss first": Sample(lambda n, loss: f"loss: {loss} | ppl: 9.0 | step: {10 * n + 10} | it/s: 4.0\n"),
    "XGBoost": Sample(
        lambda n, loss: f"[{n}]\ttrain-logloss:{loss}\teval-logloss:9.0\n", step=lambda n: n, step_s=None
    ),
    "XGBoost, several workers": Sample(
        lambda n, loss: f"[10:0{n // 60}:{n % 60:02}] [{n}]\ttrain-rmse:{loss}\ttest-rmse:9.0\n",
        step=lambda n: n,
        step_s=None,
    ),
    "LightGBM": Sample(
        lambda n, loss: f"[{n + 1}]\ttraining's binary_logloss: {loss}\tvalid_1's binary_logloss: 9.0\n",
        step=lambda n: n + 1,
        step_s=None,
    ),
    "CatBoost": Sample(
        lambda n, loss: f"{n}:\tlearn: {loss}\ttest: 9.0\tbest: 9.0 (3)\ttotal: {n + 1}s\tremaining: {99 - n}s\n",
        step=lambda n: n,
        step_s=None,
    ),
    "scikit-learn": Sample(
        lambda n, loss: f"{n + 1:10}{loss:16.4f}{5 - n / 10:15.2f}s\n",
        step=lambda n: n + 1,
        step_s=None,
        head="      Iter       Train Loss   Remaining Time\n",
    ),
    "srun": Sample(lambda n, loss: f"3: loss: {loss}\n", step=lambda n: n + 1, step_s=None),
    "Chainer": Sample(
        lambda n, loss: f"{0:<12}{n * 10 + 10:<12}{loss:<12}{'':<22}{n * 2.5:<10}\n",
        head="epoch       iteration   main/loss   validation/main/loss  elapsed_time\n",
        clock=True,
    ),
    "spaCy": Sample(
        lambda n, loss: f"{n // 10:3}{n * 10 + 10:8}{0.5:14.2f}{loss:10.2f}{60 + n:8.2f}{0.6:8.2f}\n",
        head="E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  SCORE\n---  ------  ------------  --------\n",
        step_s=None,
    ),
    "Marian": Sample(
        lambda n, loss: (
            f"[2020-01-01 10:0{n // 5}:{n % 5 * 12:02}] Ep. 1 : Up. {n * 48 + 48} : Sen. {n * 12345:,} : Cost {loss} * "
            f"{n * 1234 + 1000:,} @ 1,234 : Time 12.0s : 1234.56 words/s : L.r. 3.0e-04\n"
        ),
        step=lambda n: n * 48 + 48,
    ),
    "ParlAI": Sample(
        lambda n, loss: (
            f"10:0{n // 6}:{n % 6}0 | time:{n * 10}s total_exs:{n * 640} epochs:0.1\n    clip  gnorm  loss  lr  ppl  "
            f"ups\n     1   1.5  {loss}  1e-05  12.3  4.00\n\n"
        ),
        step=lambda n: n + 1,
    ),
    "DiT": Sample(
        lambda n, loss: (
            f"[\x1b[34m2023-02-10 {clock(n)[:8]}\x1b[0m] (step={n * 10 + 10:07d}) Train Loss: {loss}, "
            "Train Steps/Sec: 4.00\n"
        )
    ),
    "Flair": Sample(
        lambda n, loss: (
            f"2021-01-01 {clock(n)} epoch 1 - iter {n * 10 + 10}/120 - loss {loss} - time (sec): {n * 2.5:.2f} - "
            "samples/sec: 300.15 - lr: 0.100000\n"
        ),
        clock=True,
    ),
    "Coqui TTS": Sample(
        lambda n, loss: (
            f"\n\x1b[1m   --> TIME: 2022-01-01 {clock(n)[:8]} -- STEP: {n * 10 + 10}/250 -- GLOBAL_STEP: {n * 10 + 10}"
            f"\x1b[0m\n     | > loss_disc: 2.5\n     | > loss: {loss}  (4.9)\n     | > step_time: 0.25  (0.75)\n\n"
        )
    ),
    "AllenNLP": Sample(
        lambda n, loss: (
            f"\raccuracy: 0.50, batch_loss: 1.0, loss: {loss} ||:  10%|#    | {n + 1}/1000 [00:10<01:10,  4.00it/s]"
        ),
        step=lambda n: n + 1,
    ),
    "MXNet": Sample(
        lambda n, loss: f"INFO:root:Epoch[0] Batch [{n * 10 + 10}]\tSpeed: 1000.00 samples/sec\tcross-entropy={loss}\n",
        step_s=1.0,
    ),
    "Detectron": Sample(
        lambda n, loss: (
            f'json_stats: {{"accuracy_cls": 0.9, "eta": "1 day, 4:07:11", "iter": {n * 10 + 10}, "loss": {loss}, '
            '"loss_bbox": 0.1, "mem": 5000, "time": 0.25}\n'
        )
    ),
    "guided-diffusion": Sample(
        lambda n, loss: (
            f"{'-' * 28}\n| grad_norm     | 0.5      |\n| step          | {n * 10 + 10}      |\n| loss     | {loss}"
            f"      |\n{'-' * 28}\n"
        ),
        step_s=None,
    ),
    "RNN-T": Sample(
        lambda n, loss: f"Epoch: 0, Batch: {n}, Global Step: {n * 10 + 10}, Step Time: 0.2500, Loss: {loss}\n"
    ),
    "WeTTS": Sample(
        lambda n, loss: (
            f"Epoch {n // 6} [TRAIN] progress {n % 6 * 10 + 10}/60 loss {loss} polyphone_loss 0.45\n"
            + (f"Epoch {n // 6} [CV] progress 90/100 loss 9.0 polyphone_loss 1.0\n" if n == 5 else "")
        ),
        step_s=None,
    ),
}
