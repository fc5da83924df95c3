//! `PlanFile`: which machine runs which layers, from a file: a plan that `consort plan --save` wrote, in TOML, or a topology of
//! cake, in YAML.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cluster::coordinator::Layout;
use net::PeerAddress;
use plan::{CakeTopology, CakeTopologyError, PLAN_BYTES_MAX, SavedNode, SavedPlan, SavedPlanError, TOPOLOGY_BYTES_MAX};

use crate::bounded_file;

/// The largest file that is read.
const BYTES_MAX: usize = if PLAN_BYTES_MAX > TOPOLOGY_BYTES_MAX { PLAN_BYTES_MAX } else { TOPOLOGY_BYTES_MAX };

/// Its layers follow one another. Whether the model has as many is not known yet.
#[derive(Clone, Debug)]
pub enum PlanFile {
    Saved(SavedPlan),
    Topology(CakeTopology),
}

#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    #[error("{0}")]
    Read(io::Error),
    #[error("it is not text in UTF-8")]
    NotText,
    #[error("it is neither a plan, as `consort plan --save` writes it, nor a topology of cake")]
    Unknown,
    #[error(transparent)]
    Saved(#[from] SavedPlanError),
    #[error(transparent)]
    Topology(#[from] CakeTopologyError),
}

impl PlanFile {
    pub fn read(path: PathBuf) -> Result<Self, PlanFileError> {
        let bytes = bounded_file::read(&path, BYTES_MAX as u64).map_err(PlanFileError::Read)?;
        let text = String::from_utf8(bytes).map_err(|_| PlanFileError::NotText)?;
        Ok(match Format::of(&path, &text).ok_or(PlanFileError::Unknown)? {
            Format::Toml => Self::Saved(SavedPlan::parse(&text)?),
            Format::Yaml => Self::Topology(CakeTopology::parse(&text)?),
        })
    }

    /// Whether it has a machine whose address it does not say, so that the machine has to be found by its name.
    pub fn has_unknown_address(&self) -> bool {
        match self {
            Self::Saved(saved) => saved_nodes(saved).any(|node| node.address.is_none()),
            Self::Topology(_) => false,
        }
    }

    /// The layout for a model with so many layers, and the addresses in the file. Those that `resolve` does not find are left
    /// out: the machine may be off.
    pub fn layout(
        &self,
        layers: usize,
        mut resolve: impl FnMut(&PeerAddress) -> Option<SocketAddr>,
    ) -> Result<(Layout, Vec<SocketAddr>), PlanFileError> {
        let (mut saved, hosts): (_, Vec<_>) = match self {
            Self::Saved(saved) => {
                saved.check_model(layers)?;
                (Some(saved.clone()), saved_nodes(saved).filter_map(|node| node.address.clone()).collect())
            }
            Self::Topology(topology) => {
                let hosts = topology.nodes.iter().map(|node| node.host.clone()).collect();
                (topology.plan("topology", layers)?, hosts)
            }
        };
        let found: Vec<_> = hosts.into_iter().filter_map(|host| Some((resolve(&host)?, host))).collect();
        for node in saved.iter_mut().flat_map(|saved| &mut saved.stages).filter_map(|stage| stage.node.as_mut()) {
            // The coordinator knows machines by their numeric addresses.
            if let Some((address, _)) = found.iter().find(|(_, host)| node.address.as_ref() == Some(host)) {
                node.address = Some((*address).into());
            }
        }
        Ok((saved.map_or(Layout::Planned, Layout::Saved), found.into_iter().map(|(address, _)| address).collect()))
    }
}

fn saved_nodes(saved: &SavedPlan) -> impl Iterator<Item = &SavedNode> {
    saved.stages.iter().filter_map(|stage| stage.node.as_ref())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Toml,
    Yaml,
}

impl Format {
    /// By the name of the file, else by its content.
    fn of(path: &Path, text: &str) -> Option<Self> {
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        match extension.to_str() {
            Some("toml") => Some(Self::Toml),
            Some("yml" | "yaml") => Some(Self::Yaml),
            _ => Self::of_text(text),
        }
    }

    /// By the first line with content: TOML has a table or a key there, YAML a key, or the beginning of a document.
    fn of_text(text: &str) -> Option<Self> {
        let mut lines = text.lines().map(str::trim_start);
        let line = lines.find(|line| !line.is_empty() && !line.starts_with('#'))?;
        if line.starts_with("---") || line.starts_with('%') {
            return Some(Self::Yaml);
        }
        match line.find(['[', '=', ':']).map(|at| line.as_bytes()[at]) {
            Some(b'[') if line.starts_with('[') => Some(Self::Toml),
            Some(b'=') => Some(Self::Toml),
            Some(b':') => Some(Self::Yaml),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_decides_about_its_format_and_else_its_content() {
        let check = |name: &str, text: &str, expected| {
            assert_eq!(Format::of(Path::new(name), text), expected, "{name}: {text:?}");
        };
        use Format::{Toml, Yaml};
        check("a.toml", "a: 1", Some(Toml));
        check("a.YML", "a = 1", Some(Yaml));
        check("b/a.yaml", "", Some(Yaml));
        check("a", "# a plan: of\n\n version = 1\n", Some(Toml));
        check("a", "[coordinator]\nlayers = '0..2'", Some(Toml));
        check("-", "# version = 1\nden:\n  host: x", Some(Yaml));
        check("a", "--- # host = x\nden: {host: x}", Some(Yaml));
        check("a", "", None);
        check("a", "kitchen, den", None);
    }

    #[test]
    fn names_of_hosts_become_the_addresses_by_which_a_coordinator_knows_them() {
        let [near, far]: [SocketAddr; 2] = ["10.0.0.2:7420", "10.0.0.3:7420"].map(|text| text.parse().unwrap());
        let resolve = |host: &PeerAddress| match host.as_str() {
            "near.local:7420" => Some(near),
            "10.0.0.3:7420" => Some(far),
            _ => None,
        };
        let check = |file: &PlanFile, expected: &[Option<&str>]| {
            let (layout, peers) = file.layout(6, resolve).unwrap();
            assert_eq!(peers, [near, far]);
            let Layout::Saved(saved) = layout else { panic!("{layout:?}") };
            let addresses: Vec<_> =
                saved_nodes(&saved).map(|node| node.address.as_ref().map(PeerAddress::as_str)).collect();
            assert_eq!(addresses, expected);
        };
        let stage = |address: &str, layers: &str| {
            format!("[[stage]]\nnode = \"{address}\"\naddress = \"{address}\"\nlayers = \"{layers}\"\n")
        };
        let stages = [("near.local:7420", "0..2"), ("off.local:7420", "2..4"), ("10.0.0.3:7420", "4..6")];
        let plan: String = stages.map(|(address, layers)| stage(address, layers)).concat();
        let plan = SavedPlan::parse(&format!("version = 1\nmodel = \"m\"\nlayers = 6\n{plan}")).unwrap();
        let expected = [Some("10.0.0.2:7420"), Some("off.local:7420"), Some("10.0.0.3:7420")];
        check(&PlanFile::Saved(plan), &expected);
        let topology = "a: {host: 'near.local:7420', layers: [model.layers.0-3]}\nb: {host: '10.0.0.3:7420', layers: [model.layers.4-5]}";
        let topology = PlanFile::Topology(CakeTopology::parse(topology).unwrap());
        check(&topology, &[Some("10.0.0.2:7420"), Some("10.0.0.3:7420")]);
        assert!(topology.layout(7, resolve).is_err());
    }
}
