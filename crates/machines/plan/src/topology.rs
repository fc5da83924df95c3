//! cake's topology files: YAML that maps names of workers to addresses and names of layers.

mod yaml;

use types::LayerRange;

use super::assignment::range;
use super::facts::{LAYERS_MAX, NODES_MAX};
use super::saved::{SavedNode, SavedPlan, SavedStage};
use net::PeerAddress;
use yaml::{YamlError, YamlNode, YamlValue};

/// The largest file that is read.
pub const TOPOLOGY_BYTES_MAX: usize = 256 << 10;

/// The workers of a topology, in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeTopology {
    pub nodes: Vec<CakeTopologyNode>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeTopologyNode {
    pub name: String,
    pub host: PeerAddress,
    /// `None` if the file gives it no layers.
    pub layers: Option<LayerRange>,
    /// The line of the first entry of `layers`.
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CakeTopologyError {
    #[error("a topology has at most {TOPOLOGY_BYTES_MAX} bytes")]
    TooLarge,
    #[error(transparent)]
    Syntax(#[from] YamlError),
    #[error("{nodes} workers are too many: at most {} take part", NODES_MAX - 1)]
    TooManyNodes { nodes: usize },
    #[error("line {line}: worker {name:?}: {problem}")]
    Worker { line: usize, name: String, problem: String },
    #[error(
        "layers {from}..{to} have no worker. Here the coordinator runs the first layers, so the workers need all that follow"
    )]
    Unassigned { from: usize, to: usize },
    #[error("line {line}: layer {layer} of worker {name:?} belongs to worker {other:?} too")]
    Overlap { line: usize, layer: usize, name: String, other: String },
}

impl CakeTopology {
    pub fn parse(text: &str) -> Result<Self, CakeTopologyError> {
        if text.len() > TOPOLOGY_BYTES_MAX {
            return Err(CakeTopologyError::TooLarge);
        }
        let workers = match YamlNode::parse(text)? {
            YamlNode { value: YamlValue::Mapping(workers), .. } => workers,
            YamlNode { value: YamlValue::Empty, .. } => Vec::new(),
            YamlNode { line, .. } => {
                return Err(YamlError {
                    line,
                    problem: "a topology maps names of workers to their settings".to_owned(),
                }
                .into());
            }
        };
        if workers.len() >= NODES_MAX {
            return Err(CakeTopologyError::TooManyNodes { nodes: workers.len() });
        }
        let mut nodes =
            workers.iter().map(|(name, node)| CakeTopologyNode::new(name, node)).collect::<Result<Vec<_>, _>>()?;
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { nodes })
    }

    /// The plan that the file describes, for a model with this many layers; `None` if it names no layers, so that
    /// the workers are only known by their addresses. Layers before those of the first worker are the coordinator's.
    pub fn plan(&self, model: &str, layers: usize) -> Result<Option<SavedPlan>, CakeTopologyError> {
        let mut workers: Vec<_> = self.nodes.iter().filter_map(|node| Some((node, node.layers?))).collect();
        workers.sort_by_key(|(_, layers)| layers.start());
        let Some((_, first)) = workers.first() else { return Ok(None) };
        let own = range(0, first.start()).map(|layers| SavedStage { node: None, layers, line: 0 });
        check_sequence(&workers, layers)?;
        check_hosts(&workers)?;
        let stages = workers.iter().map(|(node, layers)| {
            let saved = SavedNode { name: node.name.clone(), address: Some(node.host.clone()) };
            SavedStage { node: Some(saved), layers: *layers, line: node.line }
        });
        Ok(Some(SavedPlan {
            model: model.to_owned(),
            layers,
            line: 0,
            stages: own.into_iter().chain(stages).collect(),
        }))
    }
}

/// Checks that sorted ranges follow one another up to the last layer.
fn check_sequence(workers: &[(&CakeTopologyNode, LayerRange)], model: usize) -> Result<(), CakeTopologyError> {
    for pair in workers.windows(2) {
        let ((other, before), (node, layers)) = (pair[0], pair[1]);
        if layers.start() < before.end() {
            let (name, other) = (node.name.clone(), other.name.clone());
            return Err(CakeTopologyError::Overlap { line: node.line, layer: layers.start(), name, other });
        }
        if layers.start() > before.end() {
            return Err(CakeTopologyError::Unassigned { from: before.end(), to: layers.start() });
        }
    }
    match workers.last() {
        Some((_, last)) if last.end() < model => Err(CakeTopologyError::Unassigned { from: last.end(), to: model }),
        Some((node, last)) if last.end() > model => Err(CakeTopologyError::Worker {
            line: node.line,
            name: node.name.clone(),
            problem: format!("layers {last} go beyond the model, which has {model}"),
        }),
        _ => Ok(()),
    }
}

/// Checks that each worker has an address of its own.
fn check_hosts(workers: &[(&CakeTopologyNode, LayerRange)]) -> Result<(), CakeTopologyError> {
    for (index, (node, _)) in workers.iter().enumerate() {
        if let Some((other, _)) = workers[..index].iter().find(|(other, _)| other.host == node.host) {
            return Err(CakeTopologyError::Worker {
                line: node.line,
                name: node.name.clone(),
                problem: format!("its address {} is that of worker {:?} too", node.host, other.name),
            });
        }
    }
    Ok(())
}

impl CakeTopologyNode {
    /// Fields other than these describe the worker's hardware, which is measured here.
    fn new(name: &str, node: &YamlNode) -> Result<Self, CakeTopologyError> {
        let wrong = |line: usize, problem: String| CakeTopologyError::Worker { line, name: name.to_owned(), problem };
        let scalar = |node: &YamlNode| match &node.value {
            YamlValue::Scalar(text) => Ok(text.clone()),
            _ => Err(wrong(node.line, "a text is missing".to_owned())),
        };
        let host_node = node.get("host").ok_or_else(|| wrong(node.line, "its host is missing".to_owned()))?;
        let host = scalar(host_node)?.parse().map_err(|error| wrong(host_node.line, format!("{error}")))?;
        let entries = match node.get("layers").map(|layers| (layers.line, &layers.value)) {
            None | Some((_, YamlValue::Empty)) => &[][..],
            Some((_, YamlValue::List(entries))) => entries,
            Some((line, _)) => return Err(wrong(line, "its layers are no list".to_owned())),
        };
        let mut named = Vec::new();
        for entry in entries {
            let (prefix, layers) = parse_layers(&scalar(entry)?).map_err(|problem| wrong(entry.line, problem))?;
            named.push((layers.start(), layers.end(), prefix, entry.line));
        }
        named.sort_by_key(|(start, ..)| *start);
        for pair in named.windows(2) {
            let ((_, end, prefix, _), (start, _, other, line)) = (&pair[0], &pair[1]);
            if start != end {
                let problem = format!("layer {start} does not follow layer {}; a worker has one range", end - 1);
                return Err(wrong(*line, problem));
            }
            if prefix != other {
                return Err(wrong(*line, format!("layers {prefix:?} and {other:?} are of different models")));
            }
        }
        let layers = named.first().zip(named.last()).and_then(|(first, last)| range(first.0, last.1));
        let line = entries.first().map_or(0, |entry| entry.line);
        Ok(Self { name: name.to_owned(), host, layers, line })
    }
}

/// `prefix.N` or `prefix.A-B`, which contains `B`: the prefix and the layers.
fn parse_layers(text: &str) -> Result<(String, LayerRange), String> {
    let wrong = || format!("{text:?} is not a layer: write PREFIX.N or PREFIX.FIRST-LAST, such as model.layers.0-11");
    let (rest, last) = split_number(text).ok_or_else(wrong)?;
    let (prefix, first) = match rest.strip_suffix('-') {
        Some(rest) => split_number(rest).ok_or_else(wrong)?,
        None => (rest, last),
    };
    if !prefix.ends_with("layers.") {
        return Err(wrong());
    }
    match range(first, last + 1) {
        Some(layers) if last < LAYERS_MAX => Ok((prefix.to_owned(), layers)),
        Some(_) => Err(format!("{text:?} goes beyond {LAYERS_MAX} layers")),
        None => Err(format!("{text:?} ends before it begins")),
    }
}

/// A text and the number at its end.
fn split_number(text: &str) -> Option<(&str, usize)> {
    let digits = text.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (rest, number) = text.split_at(text.len() - digits);
    // Far more than any layer, and far less than what overflows.
    Some((rest, number.parse().ok().filter(|number| *number < usize::MAX / 2)?))
}
