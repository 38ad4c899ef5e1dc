"""Further samples, as `samples`: of other trainers, of services that print logs, and of other words and signs."""

from __future__ import annotations

from typing import Final

from tests.follow.samples import SAMPLES as FIRST
from tests.follow.samples import Sample, clock

SAMPLES: Final[dict[str, Sample]] = {
    **FIRST,
    "darknet": Sample(
        lambda n, loss: (
            "Loaded: 0.000039 seconds\nRegion 82 Avg IOU: 0.766664, Class: 0.99, Obj: 0.84, No Obj:"
            f" 0.001, .5R: 1.0, .75R: 1.0,  count: 1\n {n + 1}: {loss + 0.1:.6f}, {loss:.6f} avg, 0.001000 "
            f"rate, 0.250000 seconds, {64 * (n + 1)} images\n"
        ),
        step=lambda n: n + 1,
        head="yolov3\nLearning Rate: 0.001, Momentum: 0.9, Decay: 0.0005\nResizing\n608\n",
    ),
    "darknet of AlexeyAB": Sample(
        lambda n, loss: (
            "v3 (iou loss, Normalizer: (iou: 0.07, obj: 1.00, cls: 1.00) Region 139 Avg (IOU: 0.320000),"
            f" count: 8, class_loss = 2.21, iou_loss = 1.48, total_loss = 3.69 \n total_bbox = {923054 + n},"
            f" rewritten_bbox = 3.995541 % \n\n (next mAP calculation at 1000 iterations) \n {n + 1}:"
            f" {loss + 0.1:.6f}, {loss:.6f} avg loss, 0.001000 rate, 0.250000 seconds, {64 * (n + 1)} images,"
            " 12.345678 hours left\nLoaded: 0.000051 seconds\n"
        ),
        step=lambda n: n + 1,
    ),
    "WeNet": Sample(
        lambda n, loss: (
            f"2022-05-01 {clock(n)} DEBUG TRAIN Batch {n // 6}/{n % 6 * 100} loss {loss:.6f} loss_att 9.1 loss_ctc 4.2 "
            "lr 0.00001000 rank 0\n" + "2022-05-01 10:00:00,123 DEBUG CV Batch 3/0 loss 9.0 rank 0\n" * (n % 6 == 5)
        ),
        step=lambda n: n + 1,
        step_s=2.5,
        clock=True,
    ),
    "TensorFlow NMT": Sample(
        lambda n, loss: (
            f"  step {100 * n + 100} lr 1 step-time 0.25s wps 12.34K ppl {loss} gN 5.62 bleu 0.00, Sat May 6\n"
        ),
        step=lambda n: 100 * n + 100,
    ),
    "ESPnet 2": Sample(
        lambda n, loss: (
            f"[host1] 2020-11-11 {clock(n)} (trainer:486) INFO: {n // 40 + 1}epoch:train:{(n % 40) * 50 + 1}-"
            f"{(n % 40) * 50 + 50}batch: iter_time=0.001, forward_time=0.050, loss_ctc=9.1, loss_att=8.0, acc=0.5, "
            f"loss={loss:.3f}, backward_time=0.005, optim_step_time=1.949e-04, lr_0=0.100, train_time=0.250\n"
        ),
        step=lambda n: 50 * n + 50,
        is_slow=True,
    ),
    "tinygrad": Sample(
        lambda n, loss: f"{n + 1:5} 0.25 s run, {loss:.4f} loss, 0.000000000001 LR, 642.43 GB used,  19644.30 GFLOPS\n",
        step=lambda n: n + 1,
    ),
    "rsl_rl": Sample(
        lambda n, loss: (
            f"{'#' * 80}\n                     Learning iteration {n}/10000                      \n\n "
            "                      Computation: 330526 steps/s (collection: 0.134s, learning 0.116s)\n "
            f"              Value function loss: {loss:.4f}\n                    Surrogate loss: -0.0030\n "
            "            Mean action noise std: 0.26\n                       Mean reward: 24775.79\n "
            f"              Mean episode length: 896.92\n{'-' * 80}\n                   Total timesteps:"
            f" {n * 98304}\n                    Iteration time: 0.25s\n                        Total "
            f"time: {n * 0.25:.2f}s\n                               ETA: 1234.5s\n\n"
        ),
        step=lambda n: n,
    ),
    "InternEvo": Sample(
        lambda n, loss: (
            f"2024-11-24 {clock(n, 0.25)} INFO pipeline.py:770 in record_current_batch_training_metrics "
            f"-- tflops=229.6 step={n} loss={loss} real_tgs=719.84 tgs (tokens/gpu/second)=720.46 "
            "tgs/last_tgs_1=720.46 tgs/tgs_all=716.63 lr=9.8e-05 loss_scale=16384.0 grad_norm={'0_default':"
            f" 2.15, '1_fp32': 0.0}} micro_num=16 num_consumed_tokens={1048576 * n} inf_nan_skip_batches=0 "
            "num_samples_in_batch=102 largest_length=7543 adam_beta2=0.95 fwd_bwd_time=0.24 bwd_time=0.12 "
            "acc=0.5 perplexity=9.0 loss_from_metric=2.207\n"
        ),
        step=lambda n: n,
        clock=True,
    ),
    "MiniLLM": Sample(
        lambda n, loss: (
            f"train | data_epochs  0/10 | inner iter:   {n % 8 + 1}/  8 | ppo epoch:  2/ 4 | global iter:"
            f"     {n + 1}/  5000| tot_loss: {loss:.4f} | rl_loss: -0.0407 | pt_loss: 2.3948 | pg_loss:"
            " -0.0428 | reg_loss: 0.0021 | reward: 0.1 | lr: 2.5000e-07 | scale: 128.00 | time: 0.250 "
            "| step time: 0.000\n"
        ),
        step=lambda n: n + 1,
    ),
    "BigDL": Sample(
        lambda n, loss: (
            f"2017-08-20 {clock(n, 4)[:8]} INFO  DistriOptimizer$:295 - [Epoch 64 {1792 * n}/1281167][Iteration "
            f"{n + 100}][Wall Clock {197331.83 + n * 4.25}s] Train 1792 in 4.25seconds. Throughput is 408.4 "
            f"records/second. Loss is {loss}. Current learning rate is 0.046. Current weight decay "
            "is 1.0E-4.\n"
        ),
        step=lambda n: n + 100,
        clock=True,
        step_s=4.25,
    ),
    "DeepLab": Sample(lambda n, loss: f"step {n} \t loss = {loss:.3f}, (0.250 sec/step)\n", step=lambda n: n),
    "PaddleOCR": Sample(
        lambda n, loss: (
            f"[2023/05/26 {clock(n)[:8]}] ppocr INFO: epoch: [1/2000], global_step: {10 * n + 10}, lr:"
            f" 0.000007, acc: 0.913462, norm_edit_dis: 0.980197, CTCLoss: {str(loss) + ('xxx' if loss != loss else '')}"
            f", loss: {str(loss) + ('xxx' if loss != loss else '')}, avg_reader_cost: 0.00867 s, avg_batch_cost:"
            " 0.25 s, avg_samples: 1560.0, ips: 1751.29344 samples/s, eta: 23 days, 10:11:45\n"
        )
    ),
    "PaddleSeg": Sample(
        lambda n, loss: (
            f"2021-03-30 {clock(n)[:8]} [INFO]\t[TRAIN] epoch: 1, iter: {10 * n + 10}/5000, loss: {loss:.4f},"
            " lr: 0.009657, batch_cost: 0.2500, reader_cost: 0.07273, ips: 3.7425 samples/sec | ETA "
            "00:04:16\n"
        )
    ),
    "MindSpore": Sample(
        lambda n, loss: (
            f"[2024-03-04 {clock(n, 25)[:8]}] mindocr.utils.callbacks INFO - epoch: [1/20] step: [{100 * n + 100}/4468"
            f"0], loss: {loss:f}, lr: 0.000825, per step time: 250.000 ms, fps per card: 4.40 img/s\n"
        ),
        step=lambda n: 100 * n + 100,
    ),
    "WeSep": Sample(
        lambda n, loss: (
            f"[ INFO : 2025-01-13 {clock(n, 25)} ] - |     TRAIN|         1|{100 * n + 100:10}|{loss:10.4f}|"
            "0.00072586|\n"
        ),
        step=lambda n: 100 * n + 100,
        clock=True,
        head=("[ INFO : 2025-01-13 01:09:33,989 ] - |     stage|     epoch|      iter|      Loss|        lr|\n"),
        step_s=0.25,
    ),
    "RVC": Sample(
        lambda n, loss: (
            (
                f"INFO:v1:Train Epoch: 9 [{n * 20 % 100}%]\nINFO:v1:[{200 * n + 200}, 9.99e-05]\n"
                f"INFO:v1:loss_disc=3.959, loss_gen={loss:.3f}, loss_fm=7.881,loss_mel=18.1, loss_kl=1.535\n"
            )
            + ("INFO:v1:====> Epoch: 9 [2023-07-07 13:35:13] | (1:11:57.773330)\n" if n % 5 == 4 else "")
        ),
        step=lambda n: n + 1,
        step_s=None,
    ),
    "so-vits-svc": Sample(
        lambda n, loss: (
            f"INFO:44k:Train Epoch: {n // 5} [{n * 20 % 100}%]\nINFO:44k:Losses: [2.4, 2.1, 8.0, 17.3, 1.2],"
            f" step: {200 * n + 200}, lr: 9.99e-05, reference_loss: {loss}\n"
        ),
        step=lambda n: 200 * n + 200,
        step_s=None,
    ),
    "YOLOv5": Sample(
        lambda n, loss: (
            f"\n      Epoch   gpu_mem       box       obj       cls    labels  img_size\n      {n}/299 "
            f"    3.23G   {loss:.5f}   0.05200   0.02000        30       640: 100%|##########| 8/8 "
            "[00:02<00:00,  4.00it/s]\n               Class     Images     Labels          P     "
            "     R     mAP@.5 mAP@.5:.95: 100%|###| 4/4 [00:01<00:00,  3.00it/s]\n              "
            "   all        128        929      0.577      0.414      0.46      0.28\n"
        ),
        step=lambda n: n,
        step_s=None,
    ),
    "Tensorpack": Sample(
        lambda n, loss: (
            f"[0506 {clock(n, 60)[:8]} @base.py:275] Start Epoch {n + 1} ...\n[0506 {clock(n, 60)[:8]} "
            f"@base.py:285] Epoch {n + 1} (global_step {500 * n + 500}) finished, time:55.3 seconds.\n[0506 "
            f"{clock(n, 60)[:8]} @monitor.py:467] QueueInput/queue_size: 50\n[0506 {clock(n, 60)[:8]} "
            f"@monitor.py:467] learning_rate: 0.01\n[0506 {clock(n, 60)[:8]} @monitor.py:467] total_cost:"
            f" {loss:.4f}\n"
        ),
        step=lambda n: 500 * n + 500,
        step_s=55.3,
    ),
    "fairseq2": Sample(
        lambda n, loss: (
            f"[Rank 0] 2024-05-06 {clock(n)} fairseq2 - Train Metrics (step {10 * n + 10}) - CTC Loss:"
            f" {loss:.3f} | Gradient Norm: 1.23 | Elapsed Time: 2s | Wall Time: {n * 3}s | Learning "
            "Rate: 1e-05 | Batch Size: 64 | Elements per Second: 1,234\n"
        ),
        step_s=0.3,
        clock=True,
    ),
    "Lingua": Sample(
        lambda n, loss: (
            f"0: INFO   24-11-01 {clock(n).replace(',', '.')} - 0:00:25 - step: {10 * n + 10}  acc: 0  "
            f"loss: {loss:7.4f}  grad: 1.21e+00  flops: 3.40e+14  wps: 1.20e+04  iter:  0.25  data:"
            "  0.001  lr: 1.00e-05  mem: 50%  pow: 500.1 W\n"
        ),
        step_s=1.0,
    ),
    "CLU": Sample(
        lambda n, loss: (
            f"I0506 {clock(n).replace(',', '.')}123 140 logging_writer.py:48] [{10 * n + 10}] accuracy=0.1,"
            f" loss={loss}, learning_rate=0.001, steps_per_sec=4.0\n"
        )
    ),
    "a loop in Chinese": Sample(
        lambda n, loss: (
            (f"-------第 {n // 20 + 1} 轮训练开始------\n" if n % 20 == 0 else "")
            + f"训练次数：{100 * n + 100}, Loss：{loss}\n"
            + ("整体测试集上的Loss: 262.62\n整体测试集上的正确率: 0.389\n模型已保存\n" if n % 20 == 19 else "")
        ),
        step=lambda n: 100 * n + 100,
        step_s=None,
    ),
    "words in Chinese": Sample(
        lambda n, loss: f"[信息] 轮次: 1/10 步数: {10 * n + 10}/9000 损失: {loss:.4f} 学习率: 1e-05 耗时: 0.25秒\n",
        step_s=None,
    ),
    "BasicSR": Sample(
        lambda n, loss: (
            f"2021-05-06 {clock(n, 25)} INFO: [train..][epoch:  0, iter:     {10 * n + 10:,}, lr:(2.000e-04,"
            f")] [eta: 1 day, 2:03:04, time (data): 0.250 (0.003)] l_pix: {loss:.4e} \n"
        ),
        clock=True,
        step_s=2.5,
    ),
    "DLLogger": Sample(
        lambda n, loss: (
            f'DLLL {{"timestamp": "{1593511200.1 + 2.5 * n}", "datetime": "2020-06-30 10:00:00.123456",'
            f' "elapsedtime": "{2.5 * n + 9.5}", "type": "LOG", "step": [0, {10 * n + 10}], "data": {{"loss":'
            f' {loss}, "learning_rate": 0.001}}}}\n'
        ),
        clock=True,
    ),
    "MLPerf": Sample(
        lambda n, loss: (
            f':::MLLOG {{"namespace": "", "time_ms": {1593511200100 + 2500 * n}, "event_type": "POINT_IN_TIME",'
            f' "key": "train_loss", "value": {loss}, "metadata": {{"file": "train.py", "lineno": 12,'
            f' "step_num": {10 * n + 10}}}}}\n'
        ),
        step_s=None,
        is_slow=True,
    ),
    "Tacotron 2": Sample(lambda n, loss: f"Train loss {n} {loss:.6f} Grad Norm 1.234567 0.25s/it\n", step=lambda n: n),
    "Tacotron": Sample(
        lambda n, loss: (
            f"[2018-05-06 {clock(n, 0.25)[:8]}.123]  Step {n + 1:7}  [0.250 sec/step, loss={loss:.5f},"
            f" avg_loss={loss + 0.1:.5f}]\n"
        ),
        step=lambda n: n + 1,
    ),
    "HiFi-GAN": Sample(
        lambda n, loss: f"Steps : {10 * n + 10}, Gen Loss Total : {loss:.3f}, Mel-Spec. Error : 0.500, s/b : 0.250\n"
    ),
    "Sockeye": Sample(
        lambda n, loss: (
            f"[2020-05-06:{clock(n)[:8]}:INFO:sockeye.training:_log] [MainProcess] Epoch[0] Batch "
            f"[{10 * n + 10}]\tSpeed: 1000.00 samples/sec 9000.1 tokens/sec 4.00 updates/sec\tperplexity=90.1\tcross-"
            f"entropy={loss:.6f}\n"
        )
    ),
    "older fairseq": Sample(
        lambda n, loss: (
            f"| epoch 001:     {10 * n + 10} / 11020 loss={loss:.3f}, nll_loss={loss + 1:.3f}, ppl=90.10,"
            f" wps=9000, ups=4.0, wpb=2048.0, bsz=64, num_updates={10 * n + 10}, lr=1e-05, gnorm=1.9, "
            f"clip=0.000, oom=0.000, wall={int(n * 2.5) + 3}, train_wall=2\n"
        )
    ),
    "ELECTRA": Sample(
        lambda n, loss: f"{10 * n + 10}/1000000 = 0.0%, SPS: 4.0, ELAP: {n}, ETA: 3d, 4h - loss: {loss:.4f}\n",
        step_s=1.0,
    ),
    "char-rnn": Sample(
        lambda n, loss: (
            f"{n + 1}/16700 (epoch {n / 300:.3f}), train_loss = {loss:.8f}, grad/param norm = 1.0e-01,"
            " time/batch = 0.2500s\n"
        ),
        step=lambda n: n + 1,
    ),
    "Flashlight": Sample(
        lambda n, loss: (
            f"epoch:        1 | nupdates:         {100 * n + 100} | lr: 0.010000 | lrcriterion: 0.0 | "
            "scale: 1.0 | runtime: 00:00:25 | bch(ms): 250.00 | smp(ms): 1.2 | fwd(ms): 80.1 | crit-fwd(ms):"
            f" 1.2 | bwd(ms): 120.1 | optim(ms): 12.1 | loss: {loss:10.5f} | train-TER: 99.00 | dev-loss:"
            "  9.00000 | dev-TER: 88.1 | avg-isz: 1200 | avg-tsz: 200 | max-tsz: 400 | hrs:    1.20 "
            "| thrpt(sec/sec): 120.1\n"
        ),
        step=lambda n: 100 * n + 100,
    ),
    "DeePMD-kit": Sample(
        lambda n, loss: f"{100 * n:7}      {loss + 0.1:.3e}      {loss:.3e}        1.0e-01        1.0e-01    1.0e-03\n",
        step=lambda n: 100 * n,
        step_s=None,
        head="#  step      rmse_val    rmse_trn    rmse_e_val  rmse_e_trn         lr\n",
    ),
    "NequIP": Sample(
        lambda n, loss: f"      {n // 20 + 1}  {n % 20 * 10 + 10:4}      {loss:.4f}        0.3      0.01         0.2\n",
        step=lambda n: 10 * n + 10,
        step_s=None,
        head="training\n# Epoch batch         loss       loss_f    loss_e        f_mae\n",
    ),
    "DGL": Sample(
        lambda n, loss: f"Epoch {n:05} | Time(s) 0.2500 | Loss {loss:.4f} | Accuracy 0.5000 | ETputs(KTEPS) 100.00\n",
        step=lambda n: n,
    ),
    "LightGBM's l2": Sample(
        lambda n, loss: f"[{n + 1}]\ttraining's l2: {loss}\tvalid_1's l2: 9.0\n", step=lambda n: n + 1, step_s=None
    ),
    "pdsh": Sample(
        lambda n, loss: "".join(f"10.0.0.{w}: step {10 * n + 10} loss {loss + w:.4f} dt 0.25s\n" for w in (0, 1))
    ),
    "SageMaker": Sample(
        lambda n, loss: f"#015Epoch 0:  1%|#   | {n + 1}/9000 [00:10<00:30,  4.00it/s, train_loss_step={loss}]\n",
        step=lambda n: n + 1,
    ),
    "Vertex AI": Sample(
        lambda n, loss: (
            f'{{"insertId": "x{n}", "jsonPayload": {{"levelname": "INFO", "lineno": 12, "message":'
            f' "step {10 * n + 10} loss {loss} dt 0.25s", "pathname": "/root/train.py"}}, "labels": {{"ml.googleapis.'
            f'com/tag_name": "v1"}}, "timestamp": "2025-05-06T{clock(n).replace(",", ".")}Z"}}\n'
        ),
        is_slow=True,
    ),
    "logfmt": Sample(
        lambda n, loss: (
            f'ts=2025-05-06T{clock(n)[:8]}Z level=info msg="train step" step={10 * n + 10} loss={loss} '
            "step_time=0.25s\n"
        )
    ),
    "numbers with a decimal comma by hand": Sample(
        lambda n, loss: f"step: {10 * n + 10}; loss: {loss:.3f}; time: 0.250 s\n".replace(".", ","), is_slow=True
    ),
    "a loop with emoji": Sample(
        lambda n, loss: f"🚀 Step {10 * n + 10}/9000 | 📉 Loss: {loss:.4f} | ⏱️ 0.25s/step | 💾 12.3GB\n"
    ),
    "a table with frames": Sample(
        lambda n, loss: f"│ {10 * n + 10:5} │ {loss:.4f} │ 0.25s │\n",
        head="┏━━━━┳━━━━┳━━━━┓\n┃ Step ┃ Loss ┃ Time ┃\n┡━━━━╇━━━━╇━━━━┩\n",
    ),
    "older Megatron-LM": Sample(
        lambda n, loss: (
            f" iteration {10 * n + 10:8}/  500000 | elapsed time per iteration (ms): 250.0 | learning "
            f"rate 1.000E-04 | lm loss {loss:.6E} | loss scale 65536.0 |\n"
        )
    ),
    "SSD": Sample(
        lambda n, loss: f"timer: 0.2500 sec.\niter {10 * n} || Loss: {loss:.4f} || \n", step=lambda n: 10 * n
    ),
    "StarGAN": Sample(
        lambda n, loss: (
            f"Elapsed [0:00:25], Iteration [{10 * n + 10}/200000], D/loss_real: -4.9, D/loss_fake: 1.2,"
            f" D/loss_cls: 0.3, D/loss_gp: 0.1, G/loss_fake: 0.5, G/loss_rec: {loss:.4f}, G/loss_cls:"
            " 0.4\n"
        ),
        step_s=None,
    ),
    "DCGAN": Sample(
        lambda n, loss: (
            f"[0/25][{n}/1583]\tLoss_D: 1.9000\tLoss_G: {loss:.4f}\tD(x): 0.5000\tD(G(z)): 0.5000 / 0.4000\n"
        ),
        step=lambda n: n,
        step_s=None,
    ),
    "DALL-E PyTorch": Sample(
        lambda n, loss: f"0 {10 * n} loss - {loss}\n" + (f"0 {10 * n} sample_per_sec - 12.5\n" if n % 10 == 0 else ""),
        step=lambda n: n + 1,
        step_s=None,
    ),
    "EDM": Sample(
        lambda n, loss: (
            f"tick {n:<5} kimg {50 * n:<9.1f} loss {loss:<8.5f} time {n}m 12s  sec/tick 61.1  sec/kimg "
            "1.22  maintenance 0.0\n"
        ),
        step=lambda n: n,
        step_s=61.1,
    ),
    "mmengine over epochs": Sample(
        lambda n, loss: (
            (
                f"2023/05/06 {clock(n)[:8]} - mmengine - INFO - Epoch(train)  [{n // 40 + 1}]"
                f"[{n % 40 * 10 + 10:4}/400]  base_lr: 1.0e-03 lr: 1.0e-03  eta: 12:34:56  time: 0.2500  "
                f"data_time: 0.0123  memory: 3456  loss: {loss:.4f}  loss_cls: 0.9\n"
            )
            + (
                (
                    "2023/05/06 10:00:00 - mmengine - INFO - Epoch(val)  [1][  50/1250]    eta: 0:00:30  "
                    "time: 0.0250  data_time: 0.01  memory: 500\n2023/05/06 10:00:00 - mmengine - INFO - "
                    "Epoch(val) [1][1250/1250]    coco/bbox_mAP: 0.3  data_time: 0.0048  time: 0.0350\n"
                )
                if n % 40 == 39
                else ""
            )
        )
    ),
    "slime": Sample(
        lambda n, loss: (
            f"(MegatronTrainRayActor pid=123, ip=10.0.0.1) [2025-05-06 {clock(n, 60)[:8]}] data.py:"
            f"123 - step {n}: {{'train/loss': {loss}, 'train/pg_loss': 0.01, 'train/entropy_loss':"
            f" 0.3, 'train/kl_loss': 0.001, 'train/grad_norm': 0.2, 'train/step': {n}}}\n(MegatronTrainRayActor "
            f"pid=123, ip=10.0.0.1) [2025-05-06 {clock(n, 60)[:8]}] timer.py:12 - perf {n}: {{'perf/step_time':"
            " 61.2, 'perf/actor_train_tflops': 123.4}\n"
        ),
        step=lambda n: n,
        step_s=61.2,
    ),
    "a loop with epochs by hand": Sample(
        lambda n, loss: f"epoch {n + 1}, loss {loss:.4f}, train acc 0.500, test acc 0.400, time 12.5 sec\n",
        step=lambda n: n + 1,
        step_s=12.5,
    ),
}
