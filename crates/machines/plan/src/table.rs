//! A plan as a table that people read, at most 100 columns wide.

use std::fmt;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::facts::{COORDINATOR, Cluster, ModelFacts, Optimise};
use super::units::{Bytes, Digits};
use super::{Bits, Comparison, NotUsed, Plan};
use net::PeerAddress;

/// The widest name of a node. Longer ones are cut.
const NAME_WIDTH_MAX: usize = 27;
/// The widest reason that another machine gave.
const WHY_WIDTH_MAX: usize = 300;

/// What `consort plan` prints.
pub struct PlanTable<'a> {
    pub cluster: &'a Cluster,
    pub model: &'a ModelFacts,
    pub plan: &'a Plan,
    /// For each node of the cluster.
    pub comparison: &'a [Comparison],
    /// Nodes that are not in the cluster.
    pub unusable: &'a [UnusableNode],
}

/// A node that was found, or named, and that no plan can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableNode {
    pub name: Option<String>,
    pub address: Option<PeerAddress>,
    pub why: String,
}

/// The name, the address, and why it cannot be used.
impl fmt::Display for UnusableNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().map(|name| printable(name, NAME_WIDTH_MAX));
        match (name, &self.address) {
            // It tells the node from others with this name.
            (Some(name), Some(address)) if name.contains(host(address)) => f.write_str(&name)?,
            (Some(name), Some(address)) => write!(f, "{name} ({address})")?,
            (Some(name), None) => f.write_str(&name)?,
            (None, Some(address)) => write!(f, "{address}")?,
            (None, None) => f.write_str("a node")?,
        }
        write!(f, ": {}", printable(&self.why, WHY_WIDTH_MAX))
    }
}

fn host(address: &PeerAddress) -> &str {
    address.as_str().rsplit_once(':').map_or(address.as_str(), |(host, _)| host.trim_matches(['[', ']']))
}

/// `GB/s` is how fast the node reads weights, `trip` the round trip to the node before it, `tok/s` the speed of the best
/// plan with the node, `without` that of the best plan without it.
const HEAD: [&str; 8] = ["node", "layers", "memory / free", "GB/s", "trip ms", "ms/token", "tok/s", "without"];

impl fmt::Display for PlanTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prediction = &self.plan.prediction;
        let per = match prediction.optimise {
            Optimise::Latency => "the time of a token".to_owned(),
            Optimise::Throughput => format!("the throughput of {} sequences", prediction.batch),
        };
        writeln!(
            f,
            "{}: {} layers, planned for {per} (*: coordinator)\n",
            printable(&self.model.name, 48),
            self.model.layers.len()
        )?;
        self.rows(f)?;
        writeln!(f)?;
        self.parts(f)?;
        let (one, batch) = (Digits(prediction.tokens_per_s()), Digits(prediction.batch_tokens_per_s()));
        write!(f, "predicted: {one} tokens/s for one sequence, {batch} for {}; ", prediction.batch)?;
        writeln!(f, "a prompt of {} tokens in {} s", prediction.prompt_tokens, Digits(prediction.prompt_seconds))?;
        self.bits(f)?;
        self.unused(f)?;
        self.unusable.iter().try_for_each(|node| writeln!(f, "not used: {node}"))
    }
}

impl PlanTable<'_> {
    fn rows(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = self.order();
        let mut rows = vec![HEAD.map(str::to_owned)];
        for (place, &node) in order.iter().enumerate() {
            rows.push(self.row(node, place.checked_sub(1).map(|before| order[before])));
        }
        let widths: [usize; 8] =
            std::array::from_fn(|column| rows.iter().map(|row| row[column].width()).max().unwrap_or(0));
        for row in &rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
                let space = " ".repeat(width - cell.width());
                // Names and ranges are aligned to the left, numbers to the right.
                line += &if column < 2 { format!("{cell}{space}  ") } else { format!("{space}{cell}  ") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// The coordinator, the other nodes of the chain, and those that are not used.
    fn order(&self) -> Vec<usize> {
        let used = self.plan.assignment.stages().iter().map(|(node, _)| *node).filter(|node| *node != COORDINATOR);
        let others = 1..self.cluster.nodes().len();
        let unused = others.filter(|node| self.plan.assignment.layers_of(*node).is_none());
        std::iter::once(COORDINATOR).chain(used).chain(unused).collect()
    }

    /// The row of a node, with the round trip to the one before it; for one that is not used, to the coordinator.
    fn row(&self, node: usize, before: Option<usize>) -> [String; 8] {
        let (facts, memory) = (&self.cluster.nodes()[node], &self.plan.memory[node]);
        let layers = self.plan.assignment.layers_of(node);
        let trip = before.map_or(String::new(), |before| {
            let link = self.cluster.links().between(if layers.is_some() { before } else { COORDINATOR }, node);
            Digits(link.round_trip_seconds * 1e3).to_string()
        });
        let stage = self.plan.prediction.stages.iter().find(|stage| stage.node == node);
        let rate = |rate: Option<f64>| rate.map_or("no room".to_owned(), |rate| Digits(rate).to_string());
        let comparison = &self.comparison[node];
        [
            self.name(node),
            layers.map_or("-".to_owned(), |layers| layers.to_string()),
            match memory.total() {
                0 => format!("- / {}", Bytes(memory.free)),
                total => format!("{} / {}", Bytes(total), Bytes(memory.free)),
            },
            Digits(facts.read_bytes_per_s / 1e9).to_string(),
            trip,
            stage.map_or("-".to_owned(), |stage| Digits(stage.seconds * 1e3).to_string()),
            rate(comparison.with),
            rate(comparison.without),
        ]
    }

    fn name(&self, node: usize) -> String {
        let name = printable(&self.cluster.nodes()[node].name, NAME_WIDTH_MAX);
        if node == COORDINATOR { format!("{} *", printable(&name, NAME_WIDTH_MAX - 2)) } else { name }
    }

    /// Where the time of a token goes.
    fn parts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prediction = &self.plan.prediction;
        let layers = prediction.stages.iter().fold(0.0, |sum, stage| sum + stage.seconds);
        let hops = prediction.hops.iter().fold(0.0, |sum, hop| sum + hop.seconds);
        let milliseconds = |seconds: f64| Digits(seconds * 1e3);
        let token = milliseconds(prediction.token_seconds);
        write!(f, "a token takes {token} ms ({} before it): layers {}, ", prediction.positions, milliseconds(layers))?;
        write!(f, "embedding, head and sampler {}, ", milliseconds(prediction.head_seconds))?;
        writeln!(f, "{} hops {}", prediction.hops.len(), milliseconds(hops))
    }

    fn bits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.plan.bits {
            Bits::Same(level) => {
                writeln!(f, "bits: as on one machine, and after the loss of a node: all compute with {level}")
            }
            Bits::SameWhileUsed(level) => {
                writeln!(
                    f,
                    "bits: as on one machine: the nodes used compute with {level}; others do not, so a plan with"
                )?;
                writeln!(f, "      them can change bits (--exact: one arithmetic on all nodes)")
            }
            Bits::Unlike { lowest, highest } => {
                writeln!(f, "bits: not as on one machine: nodes compute with {lowest} to {highest}")?;
                writeln!(f, "      (--exact: one arithmetic on all nodes)")
            }
        }
    }

    fn unused(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (node, comparison) in self.comparison.iter().enumerate() {
            let Some(reason) = comparison.not_used else { continue };
            let label = if node == COORDINATOR { "no layers on" } else { "not used:" };
            write!(f, "{label} {}: ", printable(&self.cluster.nodes()[node].name, NAME_WIDTH_MAX))?;
            match reason {
                NotUsed::NoRoom { needed, free } => {
                    writeln!(f, "no room: a layer needs {}, {} are free", Bytes(needed), Bytes(free))?;
                }
                NotUsed::Slower => {
                    let [with, without] =
                        [comparison.with, comparison.without].map(|rate| Digits(rate.unwrap_or(f64::NAN)));
                    writeln!(f, "no faster: {with} tokens/s with it, {without} without")?;
                }
                NotUsed::NotAsked => writeln!(f, "the given plan does not use it; with it a plan is faster")?,
            }
        }
        Ok(())
    }
}

/// A text from the network without control characters, cut to a width.
fn printable(text: &str, width_max: usize) -> String {
    let clean: String = text.chars().map(|c| if c.width().is_none() { '?' } else { c }).collect();
    if clean.width() <= width_max {
        return clean;
    }
    let mut width = 0;
    let fits = |c: &char| {
        width += c.width().unwrap_or(0);
        width < width_max
    };
    clean.chars().take_while(fits).chain(['…']).collect()
}
