//! `MachinesReply`: what `ps` reads of a server's `/v1/cluster`: the machines or peers that run the model.

use std::fmt;

use indicatif::HumanBytes;
use serde::Deserialize;

use super::status::shown;

/// Every field may be missing: the server may be another version.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct MachinesReply {
    waiting: Option<String>,
    stages: Vec<StageReply>,
    nodes: Vec<NodeReply>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StageReply {
    name: String,
    address: Option<String>,
    layers: Option<LayersReply>,
    level: Option<String>,
    threads: Option<u64>,
    ranks: Option<u64>,
    memory: Option<MemoryReply>,
    peer: Option<PeerReply>,
}

#[derive(Debug, Deserialize)]
struct LayersReply {
    start: u64,
    end: u64,
}

#[derive(Debug, Deserialize)]
struct MemoryReply {
    used_bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PeerReply {
    reach: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NodeReply {
    name: Option<String>,
    address: Option<String>,
    state: String,
    reason: Option<String>,
}

/// A line for each machine or peer, if there are others than the server's own. Those with layers come first.
impl fmt::Display for MachinesReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.waiting {
            writeln!(f, "waiting for machines: {}", shown(why))?;
        }
        if self.stages.len() > 1 || !self.nodes.is_empty() {
            self.stages.iter().try_for_each(|stage| writeln!(f, "{stage}"))?;
            // Those that have layers are among the stages.
            self.nodes.iter().filter(|node| node.state != "used").try_for_each(|node| writeln!(f, "{node}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for StageReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers = self.layers.as_ref();
        let mut facts = vec![
            layers.map_or_else(|| "no layers".to_owned(), |layers| format!("layers {}..{}", layers.start, layers.end)),
        ];
        facts.extend(self.level.as_deref().map(shown));
        facts.extend(self.threads.map(|threads| format!("{threads} threads")));
        facts.extend(self.ranks.filter(|&ranks| ranks > 1).map(|ranks| format!("{ranks} ranks")));
        facts.extend(self.memory.as_ref().map(|memory| HumanBytes(memory.used_bytes).to_string()));
        facts.extend(self.peer.as_ref().map(|peer| shown(&peer.reach)));
        facts.extend(self.address.as_deref().map(shown));
        write!(f, "{}: {}", shown(&self.name), facts.join(", "))
    }
}

impl fmt::Display for NodeReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().or(self.address.as_deref()).unwrap_or("a machine");
        let state = if self.state.is_empty() { "unknown" } else { &self.state };
        write!(f, "{}: {}", shown(name), shown(state))?;
        if let Some(reason) = &self.reason {
            write!(f, ": {}", shown(reason))?;
        }
        match &self.address {
            Some(address) if self.name.is_some() => write!(f, ", {}", shown(address)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(json: &str) -> String {
        serde_json::from_str::<MachinesReply>(json).unwrap().to_string()
    }

    #[test]
    fn machines_are_shown_by_name_with_their_layers() {
        let text = lines(
            r#"{"kind": "chain", "stages": [
                {"name": "this machine", "layers": {"start": 0, "end": 4}, "level": "avx2", "threads": 8, "ranks": 2,
                 "memory": {"used_bytes": 1048576}},
                {"name": "attic\u001b[2J", "address": "10.0.0.3:7420", "layers": {"start": 4, "end": 9}}],
                "nodes": [{"name": "attic", "state": "used"},
                {"name": "kitchen", "state": "spare", "reason": "the plan gives it none", "address": "10.0.0.4:7420"},
                {"address": "10.0.0.5:7420", "state": "connecting"}]}"#,
        );
        let expected = [
            "this machine: layers 0..4, avx2, 8 threads, 2 ranks, 1.00 MiB",
            "attic[2J: layers 4..9, 10.0.0.3:7420",
            "kitchen: spare: the plan gives it none, 10.0.0.4:7420",
            "10.0.0.5:7420: connecting",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_model_on_one_machine_has_no_list_of_machines() {
        let own = r#"{"kind": "process", "stages": [{"name": "this machine", "layers": {"start": 0, "end": 4}}], "nodes": []}"#;
        assert_eq!(lines(own), "");
        assert_eq!(
            lines(r#"{"waiting": "no machine has answered"}"#),
            "waiting for machines: no machine has answered\n"
        );
    }
}
