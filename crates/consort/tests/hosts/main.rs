//! Ranks on several hosts, through the binary: `consort ranks` processes on loopback, each of which stands for a machine.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod serving;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use serving::{Server, apart, children, completion, consort, ids, is_gone, kill, logits, oracle, run, text, tokens};

const KEY: &str = "a key that only tests have";
/// Far beyond what a test takes.
const PATIENCE: Duration = Duration::from_secs(300);
/// How far logits, which reach from -8 to 8, may be from the exact ones when the terms of sums are rounded to eight bits. Over all
/// oracles 0.42 was the most.
const APART_Q8_MAX: f32 = 0.5;

/// A machine that lends its CPUs.
struct Host {
    child: Child,
    address: String,
}

impl Host {
    fn start() -> Self {
        Self::start_at("127.0.0.1:0", Path::new("."))
    }

    fn start_at(listen: &str, folder: &Path) -> Self {
        let mut command = consort(&["ranks", "--listen", listen]);
        command.current_dir(folder).env("CONSORT_CLUSTER_KEY", KEY);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = log.find(|line| line.contains("listening on ")).unwrap();
        let address = line.rsplit(' ').next().unwrap().to_owned();
        // Read on, so that it never waits for anybody to read.
        thread::spawn(move || log.for_each(drop));
        Self { child, address }
    }

    fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What hangs fails.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, result) = channel();
    let tested = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    if result.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("the test hangs");
    }
    tested.join().unwrap();
}

fn addresses(hosts: &[Host]) -> String {
    hosts.iter().map(|host| host.address.as_str()).collect::<Vec<_>>().join(",")
}

/// One answer of a model on these hosts.
fn ask(hosts: &str, options: &[&str]) -> Output {
    let model = oracle("llama/model-f32");
    let args = ["debug", "tokens", model.to_str().unwrap(), "--tokens", "1,2,3", "--tp-hosts", hosts];
    run(&[&args, options].concat())
}

fn refused(output: &Output) -> String {
    assert!(!output.status.success() && output.stdout.is_empty(), "{}", text(&output.stdout));
    text(&output.stderr)
}

#[test]
fn greedy_tokens_are_the_oracles_on_several_hosts() {
    watched(|| {
        let hosts = [Host::start(), Host::start()];
        for architecture in ["llama", "qwen3_moe"] {
            let manifest = fs::read(oracle(architecture).join("manifest.json")).unwrap();
            let manifest: Value = serde_json::from_slice(&manifest).unwrap();
            let prompt = &manifest["prompts"][0];
            let greedy: Vec<u32> = serde_json::from_value(prompt["greedy"]["f32"]["tokens"].clone()).unwrap();
            let model = oracle(architecture).join("model-f32");
            // Rounded activations choose another expert now and then.
            let activations = if architecture == "llama" { &["f32", "q8"][..] } else { &["f32"] };
            for hosts in [addresses(&hosts[..1]), addresses(&hosts)] {
                for form in activations {
                    let options = ["--tp-hosts", &hosts, "--cluster-key", KEY, "--tp-activations", form];
                    let found = tokens(&model, &ids(&prompt["ids"]), greedy.len(), &options);
                    assert_eq!(found, greedy, "{architecture} {form} {hosts}");
                }
            }
        }
        assert!(hosts.iter().all(|host| host.ranks().is_empty()), "ranks end with their supervisor");
    });
}

#[test]
fn logits_are_bit_for_bit_those_of_ranks_on_one_host_and_near_them_when_rounded() {
    watched(|| {
        let hosts = [Host::start(), Host::start()];
        let (model, prompt, hosts) = (oracle("llama/model-f32"), "3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3", addresses(&hosts));
        let here = logits(&model, prompt, &["--tensor-parallel", "3"]);
        let options = ["--tp-hosts", &hosts, "--cluster-key", KEY];
        assert_eq!(logits(&model, prompt, &options), here);
        let rounded = logits(&model, prompt, &[&options[..], &["--tp-activations", "q8"]].concat());
        let apart = apart(&rounded, &here);
        assert!(apart > 0.0 && apart <= APART_Q8_MAX, "{apart}");
    });
}

#[test]
fn another_key_and_none_at_all_are_refused() {
    watched(|| {
        let host = Host::start();
        let log = refused(&ask(&host.address, &["--cluster-key", "another key than the host's"]));
        assert!(log.contains(&host.address) && log.contains("its key is another"), "{log}");
        let log = refused(&ask(&host.address, &[]));
        assert!(log.contains("share a key") && log.contains("--cluster-key-file"), "{log}");
        let log = refused(&ask(&host.address, &["--cluster-key", "short"]));
        assert!(log.contains("at least 16 bytes"), "{log}");
        let log = refused(&run(&["ranks", "--listen", "127.0.0.1:0"]));
        assert!(log.contains("share a key"), "{log}");

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        fs::write(&file, format!("{KEY}\n")).unwrap();
        let output = ask(&host.address, &["--cluster-key-file", file.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    });
}

#[test]
fn hosts_that_can_not_help_are_named() {
    watched(|| {
        let host = Host::start();
        let options = ["--cluster-key", KEY];
        let log = refused(&ask(&host.address, &[&options[..], &["--tensor-parallel", "3"]].concat()));
        assert!(log.contains("--tensor-parallel 3 does not fit --tp-hosts"), "{log}");
        let gone = {
            let mut gone = Host::start();
            gone.kill();
            gone.address.clone()
        };
        let log = refused(&ask(&gone, &options));
        assert!(log.contains(&format!("rank 1 on {gone}: it can not be reached")), "{log}");

        // A path that leads elsewhere there than here.
        let model = "/proc/self/cwd/model-f32";
        let elsewhere = Host::start_at("127.0.0.1:0", Path::new("/"));
        let mut command = consort(&["debug", "tokens", model, "--tokens", "1", "--tp-hosts", &elsewhere.address]);
        let output = command.args(options).current_dir(oracle("llama")).output().unwrap();
        let log = refused(&output);
        assert!(log.contains(&elsewhere.address) && log.contains(model), "{log}");
    });
}

#[test]
fn an_answer_goes_on_with_the_same_text_when_a_host_is_lost_and_comes_back() {
    watched(|| {
        let mut hosts = [Host::start(), Host::start()];
        let server = Server::start(&["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY]);
        let request = r#"{"model": "m", "prompt": "a b c", "max_tokens": 60, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;
        let whole = completion(&server.ask("POST /v1/completions", &request.replace("STREAM", "false")));
        assert!(!whole.is_empty());
        for index in [1, 0] {
            let [own, ranks] = [server.ranks(), hosts[index].ranks()];
            assert_eq!([own.len(), ranks.len()], [1, 1]);
            let mut stream = BufReader::new(server.open("POST /v1/completions", &request.replace("STREAM", "true")));
            let mut answer = String::new();
            while !answer.contains("\"text\"") {
                assert_ne!(stream.read_line(&mut answer).unwrap(), 0, "{answer}");
            }
            hosts[index].kill();
            while !is_gone(ranks[0]) {
                thread::sleep(Duration::from_millis(5));
            }
            let address = hosts[index].address.clone();
            hosts[index] = Host::start_at(&address, Path::new("."));
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(completion(&answer), whole, "{answer}");
            server.wait_until_ready();
            assert_eq!(server.ranks(), own, "the rank here keeps its weights");
        }
    });
}

#[test]
fn an_answer_goes_on_when_a_rank_elsewhere_is_killed() {
    watched(|| {
        let hosts = [Host::start()];
        let server = Server::start(&["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY]);
        let request = r#"{"model": "m", "prompt": "a b c", "max_tokens": 60, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;
        let whole = completion(&server.ask("POST /v1/completions", &request.replace("STREAM", "false")));
        let mut stream = BufReader::new(server.open("POST /v1/completions", &request.replace("STREAM", "true")));
        let mut answer = String::new();
        while !answer.contains("\"text\"") {
            assert_ne!(stream.read_line(&mut answer).unwrap(), 0, "{answer}");
        }
        kill("KILL", hosts[0].ranks()[0]);
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(completion(&answer), whole, "{answer}");
    });
}

#[test]
fn no_rank_outlives_its_supervisor_or_its_host() {
    watched(|| {
        let mut hosts = [Host::start(), Host::start()];
        let mut server = Server::start(&["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY]);
        let ranks: Vec<u32> = hosts.iter().flat_map(Host::ranks).chain(server.ranks()).collect();
        assert_eq!(ranks.len(), 3);
        hosts[0].kill();
        while !is_gone(ranks[0]) {
            thread::sleep(Duration::from_millis(5));
        }
        kill("KILL", server.child.id());
        server.child.wait().unwrap();
        while !ranks.iter().all(|&rank| is_gone(rank)) {
            thread::sleep(Duration::from_millis(5));
        }
    });
}
