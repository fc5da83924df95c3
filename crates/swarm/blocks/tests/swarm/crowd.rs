//! Everything at once: peers that fail, two that lie, a client that takes all it can get, and somebody who tells of thousands of
//! fast peers that are not there.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blocks::client::ClientOptions;
use blocks::protocols::BLOCK_PROTOCOL;
use blocks::wire::{Request, write_frame};
use directory::{AddressBlock, EXCLUDED_AT, PeerId};
use engine::Request as Prompt;
use tokio::io::{copy, sink, split};
use tokio::time::sleep;

use crate::attacker::{open, rows};
use crate::loss::{RandomFaults, Swarm, TOKENS, run};
use crate::models::{LIMITS, peer, qwen3_prompts, range};
use crate::waiting::until;

const LIARS: [u8; 2] = [6, 7];
const HOARDER: u8 = 99;
const TOLD: u16 = 10_000;

impl Swarm {
    fn add_liars(&self) {
        let layers = range(0, 2);
        for number in LIARS {
            let block = self.model.lying_block(layers, |_| true);
            self.network.add(peer(number), self.model.digest, layers, block, 1e-5);
        }
    }

    /// Somebody at one address tells of peers that nobody reaches.
    fn eclipse(&self) {
        let teller = AddressBlock::of([203, 0, 113, 1].into());
        let mut taken = 0;
        for number in 0..TOLD {
            let [high, low] = number.to_le_bytes();
            let fake = PeerId::new(&[b'f', high, low]).unwrap();
            let record = self.network.record(fake, self.model.digest, range(0, self.model.layers), 1e-6);
            taken += u16::from(self.network.view().insert_told(record, teller).is_ok());
        }
        assert!(taken > 0, "some have to be there for the test to mean something");
    }

    /// Opens sessions at a peer, and sends what fills a step, until it is stopped.
    async fn hoard(self: Arc<Self>, at: PeerId) {
        let hidden = self.model.checkpoint.description().hidden;
        let dial = self.network.dial_of(peer(HOARDER));
        let mut body = Vec::new();
        loop {
            if let Ok(stream) = dial.open(at, &[], BLOCK_PROTOCOL).await {
                let (mut replies, mut requests) = split(stream);
                let reader = tokio::spawn(async move { copy(&mut replies, &mut sink()).await });
                let mut sent = Ok(());
                for session in 0.. {
                    let open = open(self.model.digest, session, range(0, 4), LIMITS.step.rows);
                    for request in
                        [Request::Open(open), Request::Run { session, run: rows(0, LIMITS.step.rows, hidden) }]
                    {
                        let kind = request.encode(&mut body);
                        sent = sent.and(write_frame(&mut requests, kind, &body).await);
                    }
                    if sent.is_err() {
                        break;
                    }
                    sleep(Duration::from_millis(10)).await;
                }
                reader.abort();
            }
            sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_liars_a_hoarder_and_an_eclipse_at_once_change_no_token() {
    let swarm = Arc::new(Swarm::new());
    swarm.add_liars();
    swarm.eclipse();
    let hoarders: Vec<_> = (1..=5).map(|number| tokio::spawn(Arc::clone(&swarm).hoard(peer(number)))).collect();
    let prompts: Vec<_> = qwen3_prompts().into_iter().cycle().take(6).collect();
    let expected = swarm.expected(&prompts);
    let mut engine = swarm.engine_with(ClientOptions { verify: 1.0, ..ClientOptions::default() }, 2);
    let client = engine.executor().client();
    let requests = || prompts.iter().map(|prompt| Prompt::greedy(prompt.clone(), TOKENS)).collect();
    // Until the liars are known, an answer may be theirs.
    let scores = || LIARS.map(|number| swarm.network.view().score(&peer(number)));
    let is_found = || {
        run(&mut engine, requests(), |_, _| {});
        scores().iter().all(|score| *score > EXCLUDED_AT)
    };
    until(is_found, || format!("{:?} {:?}", client.counters(), scores()));
    let mut faults = RandomFaults::new();
    for _ in 0..3 {
        faults.restart();
        let found =
            tokio::task::block_in_place(|| run(&mut engine, requests(), |tokens, _| faults.go_on(tokens, &swarm)));
        assert_eq!(found, expected);
    }
    let records = swarm.network.view().records(Some(&swarm.model.digest)).len();
    assert!(records < usize::from(TOLD), "{records} records are kept");
    println!("{} faults, {} spans replaced", faults.count, client.counters().replaced.load(Ordering::Relaxed));
    hoarders.iter().for_each(tokio::task::JoinHandle::abort);
    drop(engine);
    swarm.cut_all_and_check_nothing_is_left();
}
