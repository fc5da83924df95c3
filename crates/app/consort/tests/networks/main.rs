//! What needs a network of its own, through the binary: ranks on several hosts (`consort ranks` processes on loopback or in
//! namespaces, each of which stands for a machine), and coding agents where there is no network.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod agents;
mod discovery;
mod host;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use host::{Host, KEY, addresses};
use testing::bounded::{self, ended, wait_until};
use testing::network::Network;
use testing::reserved_port::ReservedPort;
use testing::running_answer::RunningAnswer;
use testing::serving::{Server, apart, completion, consort, ids, is_gone, kill, logits, run, text, tokens};
use testing::watchdog::watched;
use testing::{needs, oracle};

/// The largest difference of logits (range -8 to 8) from the exact ones when partial sums are rounded to eight bits. The
/// largest one measured is 0.42.
const APART_Q8_MAX: f32 = 0.5;

/// Generates tokens with a model on these hosts.
fn ask(hosts: &str, options: &[&str]) -> Output {
    let model = oracle("llama/model-f32");
    let args = ["debug", "tokens", model.to_str().unwrap(), "--tokens", "1,2,3", "--tp-hosts", hosts];
    run(&[&args, options].concat())
}

const REQUEST: &str =
    r#"{"model": "m", "prompt": "a b c", "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;

/// The text of a completion without faults.
fn whole_answer(server: &Server) -> String {
    let answer = completion(&server.ask("POST /v1/completions", &REQUEST.replace("STREAM", "false")));
    assert!(!answer.is_empty());
    answer
}

/// The same completion as a stream.
fn begin_answer(server: &Server) -> RunningAnswer<'_> {
    server.begin_answer(&REQUEST.replace("STREAM", "true"))
}

/// Waits until `/ready` reports a loss with these words.
fn wait_for_loss(server: &Server, words: &str) {
    wait_until(&format!("the server says: {words}"), || {
        let ready = server.ask("GET /ready", "");
        ready.starts_with("HTTP/1.1 503") && ready.contains(words)
    });
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
            // Rounded activations sometimes select another expert.
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
        assert!(log.contains(&host.address) && log.contains("its cluster key is another"), "{log}");
        let log = refused(&ask(&host.address, &[]));
        assert!(log.contains("share a key") && log.contains("--cluster-key-file"), "{log}");
        let log = refused(&ask(&host.address, &["--cluster-key", "short"]));
        assert!(log.contains("can be guessed") && log.contains("`consort cluster key`"), "{log}");
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
        let unused = ReservedPort::reserve();
        let gone = unused.address().to_string();
        let log = refused(&ask(&gone, &options));
        assert!(log.contains(&format!("rank 1 on {gone}: it can not be reached")), "{log}");

        // A path that refers to another folder on the host than here.
        let model = "/proc/self/cwd/model-f32";
        let elsewhere = Host::start_at("127.0.0.1:0", Path::new("/"));
        let mut command = consort(&["debug", "tokens", model, "--tokens", "1", "--tp-hosts", &elsewhere.address]);
        let output = bounded::output(command.args(options).current_dir(oracle("llama")));
        let log = refused(&output);
        assert!(log.contains(&elsewhere.address) && log.contains(model), "{log}");
    });
}

#[test]
fn an_answer_goes_on_with_the_same_text_when_a_host_is_lost_and_comes_back() {
    watched(|| {
        let ports = [ReservedPort::reserve(), ReservedPort::reserve()];
        let start = |port: &ReservedPort| Host::start_at(&port.address().to_string(), Path::new("."));
        let mut hosts = ports.each_ref().map(start);
        let server = Server::start(&["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY]);
        let whole = whole_answer(&server);
        for index in [1, 0] {
            let [own, ranks] = [server.ranks(), hosts[index].ranks()];
            assert_eq!([own.len(), ranks.len()], [1, 1]);
            let mut answer = begin_answer(&server);
            answer.interrupt(|| hosts[index].kill());
            wait_until("the rank of a killed host is gone", || is_gone(ranks[0]));
            hosts[index] = start(&ports[index]);
            assert_eq!(answer.finish(), whole);
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
        let whole = whole_answer(&server);
        let (rank, mut answer) = (hosts[0].ranks()[0], begin_answer(&server));
        answer.interrupt(|| kill("KILL", rank));
        assert_eq!(answer.finish(), whole);
    });
}

/// Deadlines that are longer than a test, so that losses are not found by them.
const NEVER: &str = "load=3600,session=3600,step=3600,drain=3600";

#[test]
fn an_answer_goes_on_when_a_rank_elsewhere_is_stopped() {
    watched(|| {
        let hosts = [Host::start(), Host::start()];
        let deadlines = format!("{NEVER},stopped=0.5,silent=3600");
        let options = ["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY, "--rank-deadlines", &deadlines];
        let server = Server::start(&options);
        let (whole, own) = (whole_answer(&server), server.ranks());
        let (rank, mut answer) = (hosts[1].ranks()[0], begin_answer(&server));
        answer.interrupt(|| kill("STOP", rank));
        wait_until("a stopped rank is killed", || is_gone(rank));
        assert_eq!(answer.finish(), whole);
        server.wait_until_ready();
        // No request runs.
        let rank = hosts[0].ranks()[0];
        kill("STOP", rank);
        wait_until("a stopped rank is killed", || is_gone(rank));
        assert_eq!(whole_answer(&server), whole);
        assert_eq!(server.ranks(), own, "the rank here keeps its weights");
    });
}

#[test]
fn a_host_whose_program_is_stopped_is_lost_until_it_goes_on() {
    watched(|| {
        let hosts = [Host::start()];
        let deadlines = format!("{NEVER},silent=1");
        let options = ["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY, "--rank-deadlines", &deadlines];
        let server = Server::start(&options);
        let whole = whole_answer(&server);
        let mut answer = begin_answer(&server);
        answer.interrupt(|| kill("STOP", hosts[0].child.id()));
        wait_for_loss(&server, "nothing came from it for 1s");
        kill("CONT", hosts[0].child.id());
        assert_eq!(answer.finish(), whole);
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
        wait_until("the rank of a killed host is gone", || is_gone(ranks[0]));
        kill("TERM", hosts[1].child.id());
        assert!(ended(&mut hosts[1].child).success());
        assert!(is_gone(ranks[1]), "a host that is told to end ends its ranks first");
        kill("KILL", server.child.id());
        ended(&mut server.child);
        wait_until("the ranks of a killed supervisor are gone", || ranks.iter().all(|&rank| is_gone(rank)));
    });
}

/// Delays every packet to a host, if the kernel supports it.
fn delay_packets(network: &Network, time: &str) {
    let delay = |index: usize| {
        let arguments = format!("qdisc add dev host{index} root netem delay {time}");
        let output = network.within(0, || Command::new("tc").args(arguments.split(' ')).output());
        needs::ran("tc", output)
    };
    // Without delays, the rest of the test holds too.
    needs::netem(network.others().try_for_each(delay));
}

#[test]
fn hosts_find_each_other_over_a_network() {
    watched(|| {
        let Some(network) = Network::new(2) else { return };
        delay_packets(&network, "2ms");
        let hosts = Host::start_all(&network);
        let (model, prompt) = (oracle("qwen3/model-f32"), "3,1,4,1,5,9,2,6");
        let here = tokens(&model, prompt, 16, &[]);
        let options = ["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY];
        assert_eq!(network.within(0, || tokens(&model, prompt, 16, &options)), here);
    });
}

#[test]
fn an_answer_goes_on_when_a_host_is_unreachable_for_a_while() {
    watched(|| {
        let Some(network) = Network::new(2) else { return };
        let hosts = Host::start_all(&network);
        network.within(0, || {
            let deadlines = format!("{NEVER},silent=2");
            let options = ["--tp-hosts", &addresses(&hosts), "--cluster-key", KEY, "--rank-deadlines", &deadlines];
            let server = Server::start(&options);
            let whole = whole_answer(&server);
            let own = server.ranks();
            let mut answer = begin_answer(&server);
            answer.interrupt(|| network.unplug(1));
            wait_for_loss(&server, "nothing came from it for 2s");
            network.plug(1);
            assert_eq!(answer.finish(), whole);
            assert_eq!(server.ranks(), own, "the rank here keeps its weights");
            wait_until("the host has ended the rank that was cut off", || hosts[0].ranks().len() == 1);
        });
    });
}
