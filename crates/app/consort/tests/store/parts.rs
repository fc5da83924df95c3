//! A machine that needs a part of a model with shards fetches only the shards with its tensors.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::fake_hub::{FakeHub, HubFile};
use super::{Home, REPO, outcome};
use testing::bounded::Log;

const PROMPT: &str = "3,1,4,1,5,9,2,6";
const INDEX: &str = "model.safetensors.index.json";

fn oracle() -> PathBuf {
    testing::oracle("qwen3/model-f32")
}

/// The file for each layer, and one for all tensors outside the layers.
fn shard(name: &str) -> String {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    let number = layer.map_or(1, |layer| layer.parse::<usize>().unwrap() + 2);
    format!("model-{number:05}-of-00005.safetensors")
}

/// The files of a model of `fixtures/oracle`, its weights in five shards.
fn sharded() -> Vec<HubFile> {
    let whole = fs::read(oracle().join("model.safetensors")).unwrap();
    let header_bytes = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (header, data) = whole[8..].split_at(header_bytes);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let tensors = || header.iter().filter(|(name, _)| *name != "__metadata__");
    let map: Map<String, Value> = tensors().map(|(name, _)| (name.clone(), shard(name).into())).collect();
    let shards: BTreeSet<String> = tensors().map(|(name, _)| shard(name)).collect();
    let mut files = vec![HubFile::small(INDEX, &json!({"metadata": {}, "weight_map": map}).to_string())];
    for name in shards {
        let (mut own_header, mut own_data) = (Map::new(), Vec::new());
        for (tensor, entry) in tensors().filter(|(tensor, _)| shard(tensor) == name) {
            let at = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
            let start = own_data.len();
            own_data.extend_from_slice(&data[at(0)..at(1)]);
            let mut entry = entry.clone();
            entry["data_offsets"] = json!([start, own_data.len()]);
            own_header.insert(tensor.clone(), entry);
        }
        let own_header = Value::Object(own_header).to_string();
        let bytes = [&(own_header.len() as u64).to_le_bytes(), own_header.as_bytes(), &own_data].concat();
        files.push(HubFile { name, bytes, large: true, slow: None });
    }
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        files.push(HubFile::small(name, &fs::read_to_string(oracle().join(name)).unwrap()));
    }
    files
}

/// A machine with a cache of its own.
struct Machine {
    hub: FakeHub,
    home: Home,
}

impl Machine {
    fn new(files: &[HubFile]) -> Self {
        let hub = FakeHub::honest(REPO, files);
        let home = Home::new(&hub);
        Self { hub, home }
    }

    /// The numbers of the shards that it has fetched, in order.
    fn shards(&self) -> Vec<u32> {
        let fetched =
            self.hub.fetched().into_iter().map(|(name, _)| name).filter(|name| name.ends_with(".safetensors"));
        let mut numbers: Vec<_> = fetched.map(|name| name["model-".len()..][..5].parse().unwrap()).collect();
        numbers.sort_unstable();
        numbers
    }

    fn serve(&self, model: &str, layers: &str, options: &[&str]) -> Peer {
        let mut command = self.home.command(&["swarm", "serve", model, "--layers", layers, "--no-lan", "-t", "1"]);
        command.args(["--listen", "/ip4/127.0.0.1/tcp/0", "--identity"]).arg(self.home.folder.path().join("key"));
        let mut child = command.args(options).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let mut peer = Peer { child, address: String::new(), log };
        let mut is_served = false;
        // In either order.
        while peer.address.is_empty() || !is_served {
            let line = peer.log.next_line();
            is_served |= line.contains("the block is served");
            if let Some((_, address)) = line.split_once("--bootstrap ") {
                peer.address = address.trim().to_owned();
            }
        }
        peer
    }

    fn tokens(&self, model: &str, environment: &[(&str, &str)], options: &[&str]) -> String {
        let args = ["debug", "tokens", model, "--tokens", PROMPT, "--max-tokens", "8", "-t", "1"];
        let output = outcome(self.home.command(&args).args(options).envs(environment.iter().copied()));
        assert!(output.success, "{}", output.stderr);
        output.stdout
    }
}

/// A running `consort swarm serve`.
struct Peer {
    child: Child,
    address: String,
    log: Log,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn each_machine_of_a_swarm_fetches_only_the_shards_that_it_needs() {
    let files = sharded();
    // One peer has all files in a folder that is no cache.
    let folder = TempDir::new().unwrap();
    for file in &files {
        fs::write(folder.path().join(&file.name), &file.bytes).unwrap();
    }
    let whole = folder.path().to_str().unwrap();
    let [first, second, client] = [(); 3].map(|()| Machine::new(&files));
    let peer = first.serve(REPO, "0..2", &[]);
    assert_eq!(first.shards(), [2, 3]);
    let other = second.serve(whole, "2..4", &["--bootstrap", &peer.address]);
    assert!(second.hub.requests().is_empty());

    let bootstrap = [peer.address.as_str(), &other.address].join(",");
    let swarm = ["--swarm", "--no-lan", "--bootstrap", &bootstrap];
    let expected = second.tokens(whole, &[], &[]);
    assert_eq!(client.tokens(REPO, &[], &swarm), expected);
    assert_eq!(client.shards(), [1]);
    // What is in the cache is enough.
    let asked = client.hub.requests().len();
    assert_eq!(client.tokens(REPO, &[("HF_HUB_OFFLINE", "1")], &swarm), expected);
    assert_eq!(client.hub.requests().len(), asked);

    // It is not enough for more; then only the rest is fetched.
    let list = client.home.run(&["list"]);
    assert!(list.stdout.contains(REPO) && list.stdout.contains("incomplete"), "{}", list.stdout);
    let snapshot = client.home.snapshot("");
    let lacking = client.home.run(&["debug", "tokens", snapshot.to_str().unwrap(), "--tokens", PROMPT]);
    assert!(!lacking.success, "{}", lacking.stdout);
    assert!(lacking.stderr.contains("model-00002-of-00005.safetensors"), "{}", lacking.stderr);
    assert_eq!(client.tokens(REPO, &[], &[]), expected);
    assert_eq!(client.shards(), [1, 2, 3, 4, 5]);
}

#[test]
fn another_model_with_the_same_shapes_is_another_model() {
    let files = sharded();
    let mut tuned = files.clone();
    // The weights of a layer that neither machine of this test has.
    let last = tuned.iter_mut().find(|file| file.name == "model-00004-of-00005.safetensors").unwrap();
    *last.bytes.last_mut().unwrap() ^= 1;
    let [server, same, other] = [&files, &files, &tuned].map(|files| Machine::new(files));
    let peer = server.serve(REPO, "0..2", &[]);
    let swarm = ["--swarm", "--no-lan", "--swarm-wait", "5", "--bootstrap", &peer.address];
    for (machine, gap) in [(&same, "2..4"), (&other, "0..4")] {
        let args = [&["debug", "tokens", REPO, "--tokens", PROMPT][..], &swarm].concat();
        let output = machine.home.run(&args);
        assert!(!output.success && output.stderr.contains(gap), "{gap}: {}", output.stderr);
        assert_eq!(machine.shards(), [1]);
    }
}
