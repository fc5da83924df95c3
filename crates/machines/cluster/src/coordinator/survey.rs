//! `Survey`: the machines that a coordinator finds, and plans for them, for people. Nothing is loaded.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use plan::{Cluster, Comparison, ModelFacts, Plan, PlanError, Planner};

use super::planning::{Layout, LayoutError};
use super::{ClusterModel, ClusterReport, ClusterWatch, CoordinatorOptions, ExecutorSide, NodeFinder, TICK, Worker};

pub struct Survey {
    model: Arc<ClusterModel>,
    options: CoordinatorOptions,
    /// The machines that a plan can use. The coordinator is the first.
    pub cluster: Cluster,
    /// All machines that were found, also those that cannot be used.
    pub report: ClusterReport,
}

impl Survey {
    /// Waits for machines as long as a first chain does. `find` is called with a way to tell of machines.
    pub fn new<E>(
        options: CoordinatorOptions,
        model: ClusterModel,
        find: impl FnOnce(NodeFinder) -> Result<(), E>,
    ) -> Result<Result<Self, PlanError>, E> {
        let (events, received) = channel();
        find(NodeFinder(events.clone()))?;
        let (formed, _) = channel();
        let (replacements, _) = channel();
        let executor = ExecutorSide { formed, replacements, times: Arc::default() };
        let mut worker = Worker::new(options, model, &events, received, executor, ClusterWatch::default());
        worker.look();
        let exact = worker.exact();
        let report = worker.report.get();
        let cluster = worker.candidates(exact).map(|candidates| candidates.cluster);
        Ok(cluster.map(|cluster| Self { model: worker.model, options: worker.options, cluster, report }))
    }

    pub fn model(&self) -> &ModelFacts {
        self.model.facts()
    }

    /// The layout that was asked for.
    pub fn layout(&self) -> &Layout {
        &self.options.layout
    }

    /// The plan of the layout that was asked for, and for each machine the speed with it and without it.
    pub fn plan(&self) -> Result<(Plan, Vec<Comparison>), LayoutError> {
        let planner = Planner::new(&self.cluster, self.model.facts(), self.model.workload(), self.options.optimise)?;
        let plan = self.options.layout.plan(&planner, &self.cluster, &self.options.peers)?;
        let comparison = planner.compare(&plan);
        Ok((plan, comparison))
    }
}

impl Worker {
    /// Handles events until a first chain could be formed.
    fn look(&mut self) {
        self.wanted = Some(Instant::now());
        // The sender is alive, so waiting does not fail.
        while !self.may_form() && self.wait(TICK).is_ok() {}
        self.report_nodes();
    }
}
