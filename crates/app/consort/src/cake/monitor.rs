//! `CakeMonitor`: a chain of cake workers, as the server shows it. A worker tells only how long its layers take.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::cake::CakeStagePlan;
use cluster::chain::{ChainBuilder, ChainTimes, FormedChain};
use engine::CoordinatorStage;
use kernels::cpu::{CpuBackend, CpuOptions};
use server::{ChainSnapshot, ClusterMonitor, HopSnapshot, HopWay, NodeSnapshot, NodeUse, StageSnapshot, StageTime};
use types::LayerRange;

use crate::executors::cluster::chain_monitor::stage_time;

#[derive(Clone)]
pub struct CakeMonitor {
    /// The worker's address, and `None` for this machine; and what layers it has.
    stages: Vec<(Option<String>, Option<LayerRange>)>,
    cpu: CpuOptions,
    times: Arc<ChainTimes>,
    /// Bytes of one row of activations.
    row_bytes: u64,
    state: Arc<Mutex<CakeState>>,
}

#[derive(Debug, Default)]
struct CakeState {
    chains: u64,
    /// Why the chain does not run.
    lost: Option<String>,
}

impl CakeMonitor {
    /// Of a chain that is being formed. `hidden`: values of one row of activations.
    pub fn new(workers: &[CakeStagePlan], hidden: usize, cpu: CpuOptions, times: Arc<ChainTimes>) -> Self {
        let own = workers.first().and_then(|first| LayerRange::new(0, u32::try_from(first.layers.start()).ok()?));
        let workers = workers.iter().map(|plan| (Some(plan.host.clone()), Some(plan.layers)));
        let stages = [(None, own)].into_iter().chain(workers).collect();
        let row_bytes = (hidden * size_of::<f32>()) as u64;
        Self { stages, cpu, times, row_bytes, state: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, CakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClusterMonitor for CakeMonitor {
    fn snapshot(&self) -> ChainSnapshot {
        let times = self.times.get();
        let hops = self.stages.len() as f64;
        let stage = |(index, (host, layers)): (usize, &(Option<String>, Option<LayerRange>))| StageSnapshot {
            name: host.clone().unwrap_or_else(|| "this machine".to_owned()),
            is_coordinator: host.is_none(),
            address: host.clone(),
            layers: *layers,
            level: host.is_none().then(|| self.cpu.level.name().to_owned()),
            threads: host.is_none().then_some(self.cpu.threads),
            ranks: host.is_none().then_some(1),
            compute: Some(stage_time(times.compute.get(index).copied().unwrap_or_default())),
            // All rows go through this machine, and only their sum is measured.
            hop: Some(HopSnapshot {
                time: Some(StageTime { mean_s: times.between.mean_s / hops, total_s: times.between.total_s / hops }),
                round_trip_s: None,
                bytes: times.rows.saturating_mul(self.row_bytes),
                way: HopWay::Coordinator,
            }),
            ..StageSnapshot::default()
        };
        let state = self.state();
        ChainSnapshot {
            stages: self.stages.iter().enumerate().map(stage).collect(),
            nodes: self.stages.iter().filter_map(|(host, _)| Some(node(host.as_deref()?))).collect(),
            chains: state.chains,
            rebuilding: state.lost.clone(),
            steps: times.steps,
            step: stage_time(times.step),
            between: stage_time(times.between),
            ..ChainSnapshot::default()
        }
    }
}

fn node(host: &str) -> NodeSnapshot {
    NodeSnapshot {
        name: Some(host.to_owned()),
        address: Some(host.to_owned()),
        usage: NodeUse::Used,
        level: None,
        threads: None,
        memory_bytes: None,
        round_trip_s: None,
        peer: None,
    }
}

/// Tells a [`CakeMonitor`] when the chain is lost, and when it is formed again.
pub struct MonitoredBuilder<F> {
    inner: F,
    monitor: CakeMonitor,
}

impl<F> MonitoredBuilder<F> {
    /// The first chain is formed.
    pub fn new(inner: F, monitor: &CakeMonitor) -> Self {
        monitor.state().chains = 1;
        Self { inner, monitor: monitor.clone() }
    }
}

impl<F: ChainBuilder<CpuBackend>> ChainBuilder<CpuBackend> for MonitoredBuilder<F> {
    fn rebuild(&mut self, why: &str, stage: Option<Box<CoordinatorStage<CpuBackend>>>) {
        self.monitor.state().lost = Some(why.to_owned());
        self.inner.rebuild(why, stage);
    }

    fn poll(&mut self, wait: Duration) -> Option<FormedChain<CpuBackend>> {
        let formed = self.inner.poll(wait)?;
        let mut state = self.monitor.state();
        state.chains += 1;
        state.lost = None;
        drop(state);
        Some(formed)
    }

    fn replacement(&mut self) -> Option<String> {
        self.inner.replacement()
    }
}

#[cfg(test)]
mod tests {
    use cluster::chain::StepTimes;

    use super::*;

    /// Forms no chain.
    struct Never;

    impl ChainBuilder<CpuBackend> for Never {
        fn rebuild(&mut self, _: &str, _: Option<Box<CoordinatorStage<CpuBackend>>>) {}

        fn poll(&mut self, _: Duration) -> Option<FormedChain<CpuBackend>> {
            None
        }
    }

    #[test]
    fn workers_have_their_layers_and_this_machine_has_those_before() {
        let range = |start, end| LayerRange::new(start, end).unwrap();
        let plan = |host: &str, layers| CakeStagePlan { host: host.to_owned(), layers };
        let workers = [plan("attic:10128", range(2, 5)), plan("den:10128", range(5, 8))];
        let times = Arc::<ChainTimes>::default();
        let monitor = CakeMonitor::new(&workers, 16, CpuOptions::default(), Arc::clone(&times));
        let whole = Duration::from_micros(900);
        times.record(StepTimes { compute_us: &[100, 200, 300], whole, rows: 2, state_rows: 1 });
        let mut builder = MonitoredBuilder::new(Never, &monitor);
        let chain = monitor.snapshot();
        let shown: Vec<_> = chain.stages.iter().map(|stage| (stage.name.as_str(), stage.layers)).collect();
        let own = Some(range(0, 2));
        let wanted = [("this machine", own), ("attic:10128", Some(range(2, 5))), ("den:10128", Some(range(5, 8)))];
        assert_eq!(shown, wanted);
        assert_eq!(chain.stages[2].compute.map(|time| time.mean_s), Some(0.000_3));
        assert_eq!((chain.chains, chain.nodes.len(), chain.rebuilding), (1, 2, None));
        builder.rebuild("attic is silent", None);
        assert_eq!(monitor.snapshot().rebuilding.as_deref(), Some("attic is silent"));
        let all = CakeMonitor::new(&[plan("attic:10128", range(0, 8))], 16, CpuOptions::default(), times);
        assert_eq!(all.snapshot().stages[0].layers, None, "this machine has none");
    }
}
