//! A plan as a file that people read and edit. TOML: it has comments, and its parser names the line of a mistake.

use std::fmt;

use serde::Deserialize;
use toml::Spanned;
use types::LayerRange;

use super::assignment::{Assignment, range};
use super::error::AssignmentError;
use super::facts::{COORDINATOR, Cluster, NODES_MAX};
use net::PeerAddress;

/// The largest file that is read.
pub const PLAN_BYTES_MAX: usize = 256 << 10;

/// The version of the format that this build writes and reads.
const VERSION: i64 = 1;

/// A plan that was saved: nodes by name and address, because it outlives the cluster that it was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPlan {
    pub model: String,
    /// Layers of the model.
    pub layers: usize,
    /// The line of the file that has their number; 0 if there is no file.
    pub line: usize,
    /// In the order of the chain.
    pub stages: Vec<SavedStage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedStage {
    /// `None` for the coordinator.
    pub node: Option<SavedNode>,
    pub layers: LayerRange,
    /// The line of the file that has the layers; 0 if there is no file.
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedNode {
    pub name: String,
    pub address: Option<PeerAddress>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SavedPlanError {
    #[error("a plan has at most {PLAN_BYTES_MAX} bytes")]
    TooLarge,
    #[error("line {line}: {problem}")]
    Line { line: usize, problem: String },
    #[error("{problem}")]
    Document { problem: String },
    #[error("{}the plan is for {plan} layers, the model has {model}", At(*line))]
    Model { line: usize, plan: usize, model: usize },
    #[error("{}{source}", At(*line))]
    Assignment { line: usize, source: AssignmentError },
    #[error("{}node {name:?} is not in the cluster; its nodes are: {known}", At(*line))]
    UnknownNode { line: usize, name: String, known: String },
    #[error("{}several nodes are named {name:?}: give the address of the one that is meant", At(*line))]
    Ambiguous { line: usize, name: String },
}

/// The beginning of a message about a line, if it is known.
struct At(usize);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 0 { write!(f, "line {}: ", self.0) } else { Ok(()) }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: Spanned<i64>,
    model: String,
    layers: Spanned<usize>,
    coordinator: Option<CoordinatorTable>,
    #[serde(default)]
    stage: Vec<StageTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CoordinatorTable {
    layers: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StageTable {
    node: String,
    address: Option<Spanned<String>>,
    layers: Spanned<String>,
}

impl SavedPlan {
    pub fn new(model: &str, cluster: &Cluster, assignment: &Assignment) -> Self {
        let saved = |&(node, layers): &(usize, LayerRange)| {
            let facts = &cluster.nodes()[node];
            let saved = || SavedNode { name: facts.name.clone(), address: facts.address.clone() };
            SavedStage { node: (node != COORDINATOR).then(saved), layers, line: 0 }
        };
        let stages: Vec<_> = assignment.stages().iter().map(saved).collect();
        let layers = stages.last().map_or(0, |stage| stage.layers.end());
        Self { model: model.to_owned(), layers, line: 0, stages }
    }

    /// Reads a plan, and checks that it gives each layer to one node.
    pub fn parse(text: &str) -> Result<Self, SavedPlanError> {
        if text.len() > PLAN_BYTES_MAX {
            return Err(SavedPlanError::TooLarge);
        }
        let document: Document = toml::from_str(text).map_err(|error| syntax(text, &error))?;
        let lines = Lines(text);
        let version = document.version.get_ref();
        if *version != VERSION {
            let problem = format!("version {version}, but this build reads version {VERSION}");
            return Err(lines.error(document.version.span().start, problem));
        }
        if document.stage.len() >= NODES_MAX {
            let problem = format!("{} stages, but a cluster has at most {NODES_MAX} nodes", document.stage.len());
            return Err(SavedPlanError::Document { problem });
        }
        let own = document.coordinator.iter().map(|table| lines.stage(None, &table.layers));
        let others = document.stage.iter().map(|table| {
            let address = table.address.as_ref().map(|text| lines.address(text)).transpose()?;
            lines.stage(Some(SavedNode { name: table.node.clone(), address }), &table.layers)
        });
        let stages = own.chain(others).collect::<Result<_, _>>()?;
        let (layers, line) = (*document.layers.get_ref(), lines.at(document.layers.span().start));
        let plan = Self { model: document.model, layers, line, stages };
        plan.check_stages()?;
        Ok(plan)
    }

    /// Checks that the plan is for a model with this many layers.
    pub fn check_model(&self, layers: usize) -> Result<(), SavedPlanError> {
        match self.layers == layers {
            true => Ok(()),
            false => Err(SavedPlanError::Model { line: self.line, plan: self.layers, model: layers }),
        }
    }

    /// The nodes of a cluster that the plan means, with their layers. A node is found by its address, or else by its name.
    pub fn assignment(&self, cluster: &Cluster, layers: usize) -> Result<Assignment, SavedPlanError> {
        self.check_model(layers)?;
        let found = self.stages.iter().map(|stage| Ok((stage.find(cluster)?, stage.layers)));
        let stages = found.collect::<Result<Vec<_>, _>>()?;
        self.check(&cluster.names(), &stages)?;
        Ok(Assignment::trusted(stages))
    }

    /// Checks what does not depend on a cluster.
    fn check_stages(&self) -> Result<(), SavedPlanError> {
        let (mut nodes, mut names) = (Vec::<&SavedNode>::new(), vec!["coordinator"]);
        let mut stages = Vec::with_capacity(self.stages.len());
        for stage in &self.stages {
            let index = match &stage.node {
                None => COORDINATOR,
                Some(node) => match nodes.iter().position(|other| other.is(node)) {
                    Some(index) => index + 1,
                    None => {
                        nodes.push(node);
                        names.push(&node.name);
                        nodes.len()
                    }
                },
            };
            stages.push((index, stage.layers));
        }
        self.check(&names, &stages)
    }

    /// Checks that `stages`, which are those of the plan, are an assignment to the nodes with these names.
    fn check(&self, names: &[&str], stages: &[(usize, LayerRange)]) -> Result<(), SavedPlanError> {
        match Assignment::first_fault(names, self.layers, stages) {
            None => Ok(()),
            Some((index, source)) => {
                let line = self.stages.get(index).map_or(0, |stage| stage.line);
                Err(SavedPlanError::Assignment { line, source })
            }
        }
    }
}

impl SavedNode {
    /// Whether both mean the same node.
    fn is(&self, other: &Self) -> bool {
        match (&self.address, &other.address) {
            (Some(own), Some(theirs)) => own == theirs,
            _ => self.name == other.name,
        }
    }
}

impl SavedStage {
    /// The index of the node in the cluster.
    fn find(&self, cluster: &Cluster) -> Result<usize, SavedPlanError> {
        let Some(SavedNode { name, address }) = &self.node else { return Ok(COORDINATOR) };
        let others = || cluster.nodes().iter().enumerate().skip(1);
        if let Some((index, _)) = others().find(|(_, node)| address.is_some() && node.address == *address) {
            return Ok(index);
        }
        let mut named = others().filter(|(_, node)| node.name == *name);
        match (named.next(), named.next()) {
            (Some((index, _)), None) => Ok(index),
            (Some(_), Some(_)) => Err(SavedPlanError::Ambiguous { line: self.line, name: name.clone() }),
            (None, _) => {
                let names: Vec<_> = others().map(|(_, node)| format!("{:?}", node.name)).collect();
                let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                Err(SavedPlanError::UnknownNode { line: self.line, name: name.clone(), known })
            }
        }
    }
}

/// The text of a file, to find lines in.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn at(&self, offset: usize) -> usize {
        1 + self.0.bytes().take(offset).filter(|byte| *byte == b'\n').count()
    }

    fn error(&self, offset: usize, problem: String) -> SavedPlanError {
        SavedPlanError::Line { line: self.at(offset), problem }
    }

    fn stage(&self, node: Option<SavedNode>, layers: &Spanned<String>) -> Result<SavedStage, SavedPlanError> {
        let offset = layers.span().start;
        let wrong = || {
            let text = layers.get_ref();
            self.error(offset, format!("layers {text:?}: write FIRST..END, such as \"0..12\" for the first twelve"))
        };
        let layers = parse_range(layers.get_ref()).ok_or_else(wrong)?;
        Ok(SavedStage { node, layers, line: self.at(offset) })
    }

    fn address(&self, text: &Spanned<String>) -> Result<PeerAddress, SavedPlanError> {
        text.get_ref().parse().map_err(|error| self.error(text.span().start, format!("{error}")))
    }
}

fn parse_range(text: &str) -> Option<LayerRange> {
    let (start, end) = text.split_once("..")?;
    range(start.trim().parse().ok()?, end.trim().parse().ok()?)
}

fn syntax(text: &str, error: &toml::de::Error) -> SavedPlanError {
    // The message can have several lines.
    let problem = error.message().lines().collect::<Vec<_>>().join("; ");
    match error.span() {
        Some(span) => Lines(text).error(span.start, problem),
        None => SavedPlanError::Document { problem },
    }
}

/// The file.
impl fmt::Display for SavedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        writeln!(
            f,
            "# Which node runs which layers of a model. The stages follow one another from the first layer to the"
        )?;
        writeln!(f, "# last; FIRST..END does not contain END. The coordinator may have the first layers, or none.")?;
        writeln!(f, "version = {VERSION}")?;
        writeln!(f, "model = {}\nlayers = {}", quoted(&self.model), self.layers)?;
        for stage in &self.stages {
            match &stage.node {
                None => writeln!(f, "\n[coordinator]")?,
                Some(node) => {
                    writeln!(f, "\n[[stage]]\nnode = {}", quoted(&node.name))?;
                    if let Some(address) = &node.address {
                        writeln!(f, "address = {}", quoted(address.as_str()))?;
                    }
                }
            }
            writeln!(f, "layers = {}", quoted(&stage.layers.to_string()))?;
        }
        Ok(())
    }
}
