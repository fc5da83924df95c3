//! cake's topology files: YAML that maps names of workers to addresses and names of layers.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::Spanned;
use types::LayerRange;

use super::assignment::range;
use super::facts::{LAYERS_MAX, NODES_MAX};
use super::saved::{SavedNode, SavedPlan, SavedStage};
use net::PeerAddress;

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
    #[error("{0}")]
    Syntax(String),
    #[error("{nodes} workers are too many: at most {} take part", NODES_MAX - 1)]
    TooManyNodes { nodes: usize },
    #[error("line {line}: worker {name:?}: {problem}")]
    Worker { line: u64, name: String, problem: String },
    #[error(
        "layers {from}..{to} have no worker. Here the coordinator runs the first layers, so the workers need all that follow"
    )]
    Unassigned { from: usize, to: usize },
    #[error("line {line}: layer {layer} of worker {name:?} belongs to worker {other:?} too")]
    Overlap { line: usize, layer: usize, name: String, other: String },
}

/// Other fields of a worker describe its hardware, which is measured here.
#[derive(Deserialize)]
struct WorkerEntry {
    host: Spanned<String>,
    #[serde(default)]
    layers: Vec<Spanned<String>>,
}

impl CakeTopology {
    pub fn parse(text: &str) -> Result<Self, CakeTopologyError> {
        if text.len() > TOPOLOGY_BYTES_MAX {
            return Err(CakeTopologyError::TooLarge);
        }
        let workers: BTreeMap<String, WorkerEntry> = serde_saphyr::from_str_with_options(text, limits())
            .map_err(|error| CakeTopologyError::Syntax(error.to_string()))?;
        if workers.len() >= NODES_MAX {
            return Err(CakeTopologyError::TooManyNodes { nodes: workers.len() });
        }
        let nodes = workers.into_iter().map(|(name, entry)| CakeTopologyNode::new(name, &entry));
        Ok(Self { nodes: nodes.collect::<Result<_, _>>()? })
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
            line: node.line as u64,
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
                line: node.line as u64,
                name: node.name.clone(),
                problem: format!("its address {} is that of worker {:?} too", node.host, other.name),
            });
        }
    }
    Ok(())
}

/// A topology needs no more than this, and no aliases.
fn limits() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 200_000,
            max_nodes: 100_000,
            max_aliases: 0,
            max_anchors: 0,
            max_depth: 16,
            flow_nesting_limit: 16,
            max_documents: 1,
        },
        with_snippet: false,
    }
}

impl CakeTopologyNode {
    fn new(name: String, entry: &WorkerEntry) -> Result<Self, CakeTopologyError> {
        let wrong = |at: &Spanned<String>, problem: String| CakeTopologyError::Worker {
            line: at.referenced.line(),
            name: name.clone(),
            problem,
        };
        let host = entry.host.value.parse().map_err(|error| wrong(&entry.host, format!("{error}")))?;
        let mut named = Vec::new();
        for text in &entry.layers {
            let (prefix, layers) = parse_layers(&text.value).map_err(|problem| wrong(text, problem))?;
            named.push((layers.start(), layers.end(), prefix, text));
        }
        named.sort_by_key(|(start, ..)| *start);
        for pair in named.windows(2) {
            let ((_, end, prefix, _), (start, _, other, text)) = (&pair[0], &pair[1]);
            if start != end {
                let problem = format!("layer {start} does not follow layer {}; a worker has one range", end - 1);
                return Err(wrong(text, problem));
            }
            if prefix != other {
                return Err(wrong(text, format!("layers {prefix:?} and {other:?} are of different models")));
            }
        }
        let layers = named.first().zip(named.last()).and_then(|(first, last)| range(first.0, last.1));
        let line = entry.layers.first().map_or(0, |text| text.referenced.line() as usize);
        Ok(Self { name, host, layers, line })
    }
}

/// `prefix.N` or `prefix.A-B`, which contains `B`: the prefix and the layers.
fn parse_layers(text: &str) -> Result<(&str, LayerRange), String> {
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
        Some(layers) if last < LAYERS_MAX => Ok((prefix, layers)),
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
