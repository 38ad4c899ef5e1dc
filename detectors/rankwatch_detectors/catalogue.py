"""All detectors of a job, explicitly."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch_detectors.alerts import AlertDetector
from rankwatch_detectors.base import Detector, Kind
from rankwatch_detectors.devices.device_degraded import DeviceDegradedConfig, DeviceDegradedDetector
from rankwatch_detectors.devices.device_fault import DeviceFaultConfig, DeviceFaultDetector
from rankwatch_detectors.devices.host_degraded import HostDegradedConfig, HostDegradedDetector
from rankwatch_detectors.devices.network_degraded import NetworkDegradedConfig, NetworkDegradedDetector
from rankwatch_detectors.ends.rank_lost import RankLostConfig, RankLostDetector
from rankwatch_detectors.ends.restart_loop import RestartLoopConfig, RestartLoopDetector
from rankwatch_detectors.ends.telemetry_lost import TelemetryLostConfig, TelemetryLostDetector
from rankwatch_detectors.metric_detector import MetricDetector
from rankwatch_detectors.pace.own_past import OwnPastConfig, OwnPastDetector
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_detectors.progress.checkpoint_failed import CheckpointFailedConfig, CheckpointFailedDetector
from rankwatch_detectors.progress.checkpoint_overdue import CheckpointOverdueConfig, CheckpointOverdueDetector
from rankwatch_detectors.progress.hang import HangDetector
from rankwatch_detectors.progress.own_pace import OwnPaceDetector
from rankwatch_detectors.progress.progress_timeout import HangConfig
from rankwatch_detectors.progress.restore_failed import RestoreFailedConfig, RestoreFailedDetector
from rankwatch_detectors.refusals import RefusalConfig, RefusalDetector
from rankwatch_detectors.statistics.level import LevelConfig
from rankwatch_detectors.values.corruption import FingerprintDetector, LocalNormConfig, LocalNormDetector
from rankwatch_detectors.values.nonfinite import NonfiniteConfig, NonfiniteDetector
from rankwatch_detectors.values.training_curve import CurveConfig, CurveDetector


@dataclass(frozen=True, slots=True)
class CatalogueConfig:
    """Settings of all detectors; each class gives the reasons for its defaults."""

    device_fault: DeviceFaultConfig = field(default_factory=DeviceFaultConfig)
    network_degraded: NetworkDegradedConfig = field(default_factory=NetworkDegradedConfig)
    device_degraded: DeviceDegradedConfig = field(default_factory=DeviceDegradedConfig)
    host_degraded: HostDegradedConfig = field(default_factory=HostDegradedConfig)
    checkpoint_failed: CheckpointFailedConfig = field(default_factory=CheckpointFailedConfig)
    restore_failed: RestoreFailedConfig = field(default_factory=RestoreFailedConfig)
    nonfinite: NonfiniteConfig = field(default_factory=NonfiniteConfig)
    rank_lost: RankLostConfig = field(default_factory=RankLostConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    telemetry_lost: TelemetryLostConfig = field(default_factory=TelemetryLostConfig)
    local_norm: LocalNormConfig = field(default_factory=LocalNormConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    slowdown: SlowdownConfig = field(default_factory=SlowdownConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    own_past: OwnPastConfig = field(default_factory=OwnPastConfig)
    loss: CurveConfig = field(default_factory=CurveConfig)
    grad_norm: CurveConfig = field(
        # Norms scatter in proportion to their level and often jump by half: below twice the level nothing is reported.
        default_factory=lambda: CurveConfig(
            "grad_norm", LevelConfig(logarithmic=True, ratio_jump=10.0, scale_floor_ratio=0.07), 4.0
        )
    )
    checkpoint_overdue: CheckpointOverdueConfig = field(default_factory=CheckpointOverdueConfig)
    restart_loop: RestartLoopConfig = field(default_factory=RestartLoopConfig)
    refusals: RefusalConfig = field(default_factory=RefusalConfig)


def detectors(config: CatalogueConfig | None = None) -> list[Detector]:
    """A new detector of each kind for one job, ordered so that causes come before their consequences."""
    config = config or CatalogueConfig()
    return [
        DeviceFaultDetector(config.device_fault),
        NetworkDegradedDetector(config.network_degraded),
        DeviceDegradedDetector(config.device_degraded),
        HostDegradedDetector(config.host_degraded),
        CheckpointFailedDetector(config.checkpoint_failed),
        RestoreFailedDetector(config.restore_failed),
        NonfiniteDetector(config.nonfinite),
        RankLostDetector(config.rank_lost),
        TelemetryLostDetector(config.telemetry_lost),
        HangDetector(config.hang),
        OwnPaceDetector(config.hang),
        FingerprintDetector(),
        LocalNormDetector(config.local_norm),
        StragglerDetector(config.straggler),
        SlowdownDetector(config.slowdown),
        StageDetector(config.stage),
        OwnPastDetector(config.own_past),
        CurveDetector(Kind.LOSS_SPIKE, config.loss),
        CurveDetector(Kind.LOSS_DIVERGENCE, config.loss),
        CurveDetector(Kind.GRAD_NORM, config.grad_norm),
        RestartLoopDetector(config.restart_loop),
        CheckpointOverdueDetector(config.checkpoint_overdue),
        RefusalDetector(Kind.LIMIT_REACHED, config.refusals),
        RefusalDetector(Kind.FORGED_TELEMETRY, config.refusals),
        MetricDetector(),
        AlertDetector(),
    ]
