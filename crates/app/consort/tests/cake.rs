//! cake's protocol through the binary, with the independent programs of `tests/cake` on the other side.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};

use tempfile::tempdir;
use testing::bounded::{Log, ended};
use testing::cake_programs::{Prompt, TOKENS, prompts, python, run_master, worker};
use testing::python::PythonServer;
use testing::reserved_port::ReservedPort;
use testing::serving::{Server, completion, consort, kill, logits, run, text, tokens};
use testing::watchdog::watched;
use testing::{needs, oracle};
use types::TokenId;

const KEY: &str = "a key for tests of cake";
const MODEL: &str = "qwen3/model-f32";

fn model() -> String {
    oracle(MODEL).to_str().unwrap().to_owned()
}

fn greedy(prompts: &[Prompt]) -> Vec<Vec<TokenId>> {
    prompts.iter().map(|prompt| prompt.greedy[..TOKENS].to_vec()).collect()
}

/// `consort join --protocol cake`. Dropping it ends the process.
struct Worker {
    child: Child,
    address: String,
    discovery_port: String,
    log: Log,
}

impl Worker {
    fn start(store: &Path, options: &[&str]) -> Self {
        let common = ["join", "--protocol", "cake", "--cluster-key", KEY, "--listen", "127.0.0.1:0"];
        let places = ["--cake-discovery-port", "0", "--store", store.to_str().unwrap()];
        let mut command = consort(&[&common[..], &places, options].concat());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let (mut address, mut discovery_port, mut is_announced) = (None, None, false);
        while address.is_none() || discovery_port.is_none() || !is_announced {
            let line = log.next_line();
            let last = line.split_whitespace().last().map(|word| word.trim_end_matches('"').to_owned());
            if line.contains("listening on ") {
                address = line.split("listening on ").nth(1).unwrap().split_whitespace().next().map(str::to_owned);
            }
            if line.contains("find this machine on UDP port") {
                discovery_port = last;
            }
            is_announced |= line.contains("nothing is encrypted");
        }
        Self { child, address: address.unwrap(), discovery_port: discovery_port.unwrap(), log }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The independent master generates on our worker. Returns what it says about the set-up.
fn check_master(worker: &Worker, arguments: &[&str]) -> String {
    let (prompts, model) = (prompts("qwen3", "f32"), model());
    let common = ["--model", &model, "--key", KEY, "--worker", &worker.address];
    let (tokens, said) = run_master(&[&common[..], arguments].concat(), &prompts);
    assert_eq!(tokens, greedy(&prompts), "{arguments:?}");
    said
}

#[test]
fn a_cake_master_generates_on_a_machine_with_weights_of_its_own() {
    if !needs::python() {
        return;
    }
    watched(|| {
        let store = tempdir().unwrap();
        let mut worker = Worker::start(store.path(), &["--model", &model()]);
        for arguments in [&["--remote", "0-3"][..], &["--remote", "2-2", "--dtype", "F16"]] {
            check_master(&worker, arguments);
        }
        assert_eq!(check_master(&worker, &["--remote", "1-2", "--setup"]).trim(), "has data");
        assert!(!store.path().join("cake").exists(), "nothing was received");
        kill("TERM", worker.child.id());
        assert!(ended(&mut worker.child).success(), "{}", worker.log.rest());
    });
}

#[test]
fn a_cake_master_finds_a_machine_and_sends_it_weights_once() {
    if !needs::python() {
        return;
    }
    watched(|| {
        for variant in [&[][..], &["--older"]] {
            let (store, model) = (tempdir().unwrap(), model());
            for data in ["needs data", "has data"] {
                let worker = Worker::start(store.path(), &[]);
                let prompts = prompts("qwen3", "f32");
                let common = ["--model", &model, "--key", KEY, "--discover", &worker.discovery_port];
                let arguments = [&common[..], &["--remote", "1-2", "--setup"], variant].concat();
                let (tokens, said) = run_master(&arguments, &prompts);
                assert_eq!((tokens, said.trim()), (greedy(&prompts), data));
            }
        }
    });
}

#[test]
fn a_store_that_is_too_small_takes_no_weights() {
    if !needs::python() {
        return;
    }
    watched(|| {
        let store = tempdir().unwrap();
        let worker = Worker::start(store.path(), &["--store-max", "10K"]);
        let model = model();
        let arguments = ["--model", &model, "--key", KEY, "--worker", &worker.address, "--remote", "1-2", "--setup"];
        let output = python("master.py").args(arguments).args(["--tokens", "1", "[[1]]"]).output().unwrap();
        assert!(!output.status.success());
        worker.log.line_with("a cake master's assignment failed");
        let kept = fs::read_dir(store.path().join("cake")).unwrap().map(|entry| entry.unwrap().path());
        assert!(kept.into_iter().all(|path| path.extension().is_some_and(|extension| extension == "lock")));
    });
}

#[test]
fn hostile_masters_write_nothing_and_an_honest_one_is_served_after_each() {
    if !needs::python() {
        return;
    }
    watched(|| {
        let parent = tempdir().unwrap();
        let store = parent.path().join("store");
        let worker = Worker::start(&store, &[]);
        let model = model();
        // The model's own limit.
        let arguments = ["--worker", &worker.address, "--key", KEY, "--model", &model, "--positions", "1024"];
        for extra in [&["--setup"][..], &[]] {
            if extra.is_empty() {
                check_master(&worker, &["--remote", "0-1", "--setup"]);
            }
            let output = python("attack.py").args(arguments).args(extra).output().unwrap();
            assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        }
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(&store).unwrap().count(), 1);
    });
}

fn python_worker(arguments: &[&str]) -> PythonServer {
    worker(&[&["--key", KEY], arguments].concat())
}

/// The greedy tokens of a prompt with these options are those of the oracle.
fn check_tokens(options: &[&str]) {
    for prompt in prompts("qwen3", "f32") {
        let ids = prompt.tokens.iter().map(|token| token.0.to_string()).collect::<Vec<_>>().join(",");
        let found = tokens(&oracle(MODEL), &ids, TOKENS, &[&["--cluster-key", KEY], options].concat());
        let expected: Vec<u32> = prompt.greedy[..TOKENS].iter().map(|token| token.0).collect();
        assert_eq!(found, expected, "{options:?}");
    }
}

#[test]
fn cake_workers_with_weights_of_their_own_run_layers() {
    if !needs::python() {
        return;
    }
    watched(|| {
        let model = model();
        let workers = [(); 2].map(|()| python_worker(&["--model", &model]));
        let addresses = workers.each_ref().map(|worker| worker.address.to_string());
        let [first, second] = addresses.each_ref().map(String::as_str);
        check_tokens(&["--cake-worker", first]);
        check_tokens(&["--cake-worker", first, "--split", "4"]);
        check_tokens(&["--cake-worker", first, "--cake-worker", second, "--split", "1,2"]);
        let half = python_worker(&["--model", &model, "--dtype", "F16"]);
        check_tokens(&["--cake-worker", &half.address.to_string()]);
    });
}

#[test]
fn cake_workers_without_weights_are_sent_them() {
    if !needs::python() {
        return;
    }
    watched(|| {
        for (worker_options, options) in [(&[][..], &[][..]), (&["--older"], &["--cake-older"])] {
            let cache = tempdir().unwrap();
            for said in ["set up 2 needs data\n", "set up 2 has data\n"] {
                let folder = ["--cache", cache.path().to_str().unwrap()];
                let mut worker = python_worker(&[&folder, worker_options].concat());
                let prompt = &prompts("qwen3", "f32")[1];
                let ids = prompt.tokens.iter().map(|token| token.0.to_string()).collect::<Vec<_>>().join(",");
                let address = worker.address.to_string();
                let options = [&["--cluster-key", KEY, "--cake-worker", &address, "--split", "2"], options].concat();
                let found = tokens(&oracle(MODEL), &ids, TOKENS, &options);
                let expected: Vec<u32> = prompt.greedy[..TOKENS].iter().map(|token| token.0).collect();
                assert_eq!(found, expected);
                assert_eq!(worker.line(), said);
            }
        }
    });
}

#[test]
fn run_answers_as_one_process_and_says_that_nothing_is_encrypted() {
    if !needs::python() {
        return;
    }
    watched(|| {
        let model = model();
        let worker = python_worker(&["--model", &model]);
        let address = worker.address.to_string();
        let args = ["run", &model, "a b c", "--raw", "--temperature", "0", "--max-tokens", "12", "--stats=never"];
        let alone = run(&args);
        let output = run(&[&args[..], &["--cake-worker", &address, "--cluster-key", KEY]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(!output.stdout.is_empty() && output.stdout == alone.stdout, "{}", text(&output.stdout));
        assert!(text(&output.stderr).contains("not encrypted"), "{}", text(&output.stderr));
    });
}

#[test]
fn machines_of_ours_that_speak_cakes_protocol_change_no_bit() {
    watched(|| {
        let (stores, prompt) = ([(); 2].map(|()| tempdir().unwrap()), "3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3");
        let workers = stores.each_ref().map(|store| Worker::start(store.path(), &[]));
        let model = oracle("llama/model-f32");
        let alone = logits(&model, prompt, &[]);
        let discover = format!("--cake-discover=127.0.0.1:{}", workers[0].discovery_port);
        let second = ["--cake-worker", &workers[1].address];
        let options = [&["--cluster-key", KEY, &discover][..], &second].concat();
        assert_eq!(logits(&model, prompt, &options), alone);
        // People are told who was asked and who was not.
        let said =
            text(&run(&[&["debug", "tokens", model.to_str().unwrap(), "--tokens", "1"][..], &options].concat()).stderr);
        for (worker, how) in [(&workers[0], "has answered and is used"), (&workers[1], "has not answered; it is tried")]
        {
            assert!(said.contains(&format!("cake worker {} {how}", worker.address)), "{said}");
        }
        // Both got layers, and keep their weights.
        for (worker, store) in workers.iter().zip(&stores) {
            worker.log.line_with("serve a cake master");
            let kept = fs::read_dir(store.path().join("cake")).unwrap().map(|entry| entry.unwrap().path());
            assert_eq!(kept.into_iter().filter(|path| path.is_dir()).count(), 1);
        }
    });
}

#[test]
fn a_master_without_our_key_is_mentioned_once() {
    watched(|| {
        let store = tempdir().unwrap();
        let worker = Worker::start(store.path(), &[]);
        // It sends a hello instead of a nonce, as a master without a key does; or it sees that our proof is not its own.
        let mut master = TcpStream::connect(&worker.address).unwrap();
        master.write_all(&[7; 32]).unwrap();
        drop(master);
        let line = worker.log.line_with("callers were refused");
        assert!(line.contains("it has none, or another"), "{line}");
    });
}

#[test]
fn an_answer_goes_on_with_the_same_text_when_a_worker_is_killed_and_comes_back() {
    if !needs::python() {
        return;
    }
    let request = r#"{"model": "m", "prompt": "a b c", "max_tokens": 60, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;
    watched(|| {
        let whole = completion(&Server::start(&[]).ask("POST /v1/completions", &request.replace("STREAM", "false")));
        assert!(!whole.is_empty());
        let (model, cache) = (model(), tempdir().unwrap());
        let folder = cache.path().to_str().unwrap();
        // With weights of its own; and set up by us, again after it comes back.
        for weights in [["--model", &model], ["--cache", folder]] {
            let reserved = ReservedPort::reserve();
            let port = reserved.address().port().to_string();
            let start = || python_worker(&[&weights[..], &["--port", &port]].concat());
            let mut worker = start();
            let address = worker.address.to_string();
            let server = Server::start(&["--cake-worker", &address, "--cluster-key", KEY, "--split", "2"]);
            server.log.line_with("is not encrypted");
            for _ in 0..2 {
                let mut answer = server.begin_answer(&request.replace("STREAM", "true"));
                answer.interrupt(|| worker.kill());
                server.log.line_with("the chain is lost, and is formed again");
                server.log.line_with("the chain cannot be formed yet");
                worker = start();
                assert_eq!(answer.finish(), whole);
            }
            server.wait_until_ready();
        }
    });
}

#[test]
fn workers_that_cannot_be_used_are_named_with_the_reason() {
    if !needs::python() {
        return;
    }
    let model = model();
    let worker = python_worker(&["--model", &model]);
    let unused = ReservedPort::reserve();
    let (address, nowhere) = (worker.address.to_string(), unused.address().to_string());
    let gguf = oracle("llama/gguf/tiny-llama-q8_0.gguf");
    for (model, worker, key, why) in [
        (model.as_str(), &address, "another key of the tests", "the other side has another cluster key"),
        (&model, &nowhere, KEY, "Connection refused"),
        (gguf.to_str().unwrap(), &address, KEY, "this one is a GGUF file"),
    ] {
        let output = run(&["debug", "tokens", model, "--tokens", "1", "--cake-worker", worker, "--cluster-key", key]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
        assert!(said.contains(worker.as_str()) || why.contains("GGUF"), "{said}");
    }
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let model = model();
    let debug = ["debug", "tokens", &model, "--tokens", "1"];
    let worker = ["--cake-worker", "127.0.0.1:1"];
    let keyed = [&worker[..], &["--cluster-key", KEY]].concat();
    for (command, options, why) in [
        (&debug[..], &worker[..], "share a key"),
        (
            &debug,
            &[&keyed[..], &["--node", "127.0.0.1:2"]].concat(),
            "do not work together with --cluster, --node and --plan",
        ),
        (&debug, &[&keyed[..], &["--tensor-parallel", "2"]].concat(), "do not work together with --tensor-parallel"),
        (&debug, &[&keyed[..], &["--split", "1,2"]].concat(), "--split has 2 numbers for 1 times --cake-worker"),
        (&debug, &[&keyed[..], &["--cake-discover", "--split", "1"]].concat(), "--split needs an order"),
        (&debug, &[&keyed[..], &["--split", "5"]].concat(), "gives away 5 layers, the model has 4"),
        (&debug, &["--cake-older"], "--cake-older needs --cake-worker"),
        (&debug, &["--split", "1"], "--split has 1 numbers for 0 times --node"),
        (&["serve", &model], &[&keyed[..], &["--speculate", "3"]].concat(), "--speculate does not work with cake"),
        (&["join"], &["--model", &model], "--model needs --protocol cake"),
        (&["join"], &["--cake-discovery-port", "1"], "--cake-discovery-port needs --protocol cake"),
        (&["join"], &["--protocol", "cake", "--cluster-key", KEY, "--no-mdns"], "--no-mdns does not apply"),
        (&["join"], &["--protocol", "cake"], "share a key"),
        (&["join"], &["--protocol", "cake", "--cluster-key", "short"], "can be guessed"),
    ] {
        let mut command = consort(&[command, options].concat());
        let output = testing::bounded::output(command.env_remove("CONSORT_CLUSTER_KEY"));
        let said = text(&output.stderr);
        assert!(said.contains(why), "{options:?}: {said}");
        assert_eq!(output.status.code(), Some(2), "{options:?}: {said}");
    }
}
