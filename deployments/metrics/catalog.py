"""METRICS: all metrics of a node."""

from deployments.metrics.engine_metrics import ENGINE_METRICS
from deployments.metrics.ingress_metrics import INGRESS_METRICS
from deployments.metrics.metric import Metric
from deployments.metrics.vllm_metrics import VLLM_METRICS

METRICS: tuple[Metric, ...] = (*VLLM_METRICS, *ENGINE_METRICS, *INGRESS_METRICS)
"""vLLM's names first; a metric without samples on a node is not shown there."""
