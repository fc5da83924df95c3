//! `consort plan`: which machine would run which layers of a model, and how fast that would be.

use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use cluster::coordinator::{Layout, Survey};
use model::Checkpoint;
use plan::{Comparison, Plan, PlanTable, SavedPlan, UnusableNode};

use super::serve::capacity::{CapacityOptions, Share};
use crate::model_config::ModelConfig;
use crate::options::{ModelName, ModelOptions, ThreadOption};
use crate::store::Store;
use crate::terminal;

/// Show which machine would run which layers, how fast, and why a machine is not used
///
/// Finds the machines of this network that run `consort join` with the same key, and measures them. Nothing is loaded. The plan
/// is the one that `consort serve` makes with the same options.
#[derive(Args, Debug)]
pub struct PlanArgs {
    #[command(flatten)]
    model: ModelName,
    /// Write the plan to a file, to be edited and given to --plan; - is standard output, without the table
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    capacity: CapacityOptions,
    #[command(flatten)]
    options: ModelOptions,
}

impl PlanArgs {
    pub fn run(mut self) -> Result<()> {
        self.options.placement.cluster.imply_cluster();
        let config = ModelConfig::new(&self.options)?;
        let files = Store::from_environment()?.resolve(self.model.get())?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let (capacity, _) = self.capacity.capacity(&config, &checkpoint, 0, Share::Most)?;
        let (survey, unusable) = config.survey(&files.path, &checkpoint, &self.threads, capacity)?;
        let (plan, comparison) = survey.plan().inspect_err(|_| {
            unusable.iter().for_each(|node| terminal::note(&format!("not used: {node}")));
        })?;
        if let Layout::Saved(saved) = survey.layout()
            && let Err(error) = saved.assignment(&survey.cluster, survey.model().layers.len())
        {
            terminal::note(&format!("the plan that was given cannot be kept: {error}"));
        }
        match &self.save {
            Some(file) if file.as_os_str() == "-" => {
                terminal::print_line(saved(&survey, &plan).to_string().trim_end())?
            }
            Some(file) => {
                let text = saved(&survey, &plan).to_string();
                fs::write(file, text).with_context(|| format!("write {}", file.display()))?;
                print(&survey, &plan, &comparison, &unusable)?;
            }
            None => print(&survey, &plan, &comparison, &unusable)?,
        }
        Ok(())
    }
}

fn saved(survey: &Survey, plan: &Plan) -> SavedPlan {
    SavedPlan::new(&survey.model().name, &survey.cluster, &plan.assignment)
}

fn print(survey: &Survey, plan: &Plan, comparison: &[Comparison], unusable: &[UnusableNode]) -> Result<()> {
    let (cluster, model) = (&survey.cluster, survey.model());
    Ok(write!(stdout(), "{}", PlanTable { cluster, model, plan, comparison, unusable })?)
}
