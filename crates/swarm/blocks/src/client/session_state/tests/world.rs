//! `World`: a client with a model of a chain, in which jobs, faults and the order of messages are random. Every result is checked.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::super::*;

const HIDDEN: usize = 2;
const VOCAB: usize = 3;
const LAYERS: usize = 6;
const TOKENS_MAX: usize = 60;
const ROWS_MAX: usize = 5;
/// Events of one run; steps in which nothing happens but that time passes.
const EVENTS: usize = 160;
const PATIENCE: usize = 40;

type Row = [f32; HIDDEN];

/// What layers make of rows: all that came before counts. The numbers stay small, so they are exact.
fn computed(rows: &[Row], layers: std::ops::Range<usize>) -> Vec<Row> {
    let mut rows = rows.to_vec();
    for layer in layers {
        let mut sums = [layer as f32, 1.0];
        for (index, row) in rows.iter_mut().enumerate() {
            sums = [(sums[0] + row[0] * (index + 1) as f32) % 97.0, (sums[1] + row[1] + row[0]) % 89.0];
            *row = sums;
        }
    }
    rows
}

/// What a peer with a head makes of its last row.
fn logits(row: Row) -> [f32; VOCAB] {
    [row[0] + row[1], row[0], -row[1]]
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }

    fn is(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// What a peer does wrong, in percent of its messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// It is not there any more, which its client learns, or does not.
    pub lost: usize,
    pub silent: usize,
    pub garbled: usize,
    /// Replies that come twice, replies that nobody asked for, and replies that overtake others.
    pub twice: usize,
    pub unasked: usize,
    pub overtaking: usize,
    /// Rows that are not passed on: it says so, or it does not.
    pub unlinked: usize,
    pub dropped: usize,
    /// Last spans that return logits.
    pub logits: usize,
    /// The client drops what it keeps for replays, at times.
    pub unkept: usize,
}

enum ToPeer {
    Run(Run),
    Route { accepts: Option<PushKey>, next: Option<(SpanId, PushKey)> },
}

enum FromPeer {
    Returned(Returned),
    Ended,
}

/// A peer with a session.
struct Peer {
    layers: LayerRange,
    returns_logits: bool,
    rows: Vec<Row>,
    accepts: Option<PushKey>,
    next: Option<(SpanId, PushKey)>,
    is_silent: bool,
    has_ended: bool,
    inbox: VecDeque<ToPeer>,
    pushes: VecDeque<(PushKey, Run)>,
    outbox: VecDeque<FromPeer>,
}

struct PendingJob {
    end: usize,
    states: Vec<f32>,
    takes_logits: bool,
}

/// A client, its chain, and everything that is on its way.
struct World {
    random: Random,
    faults: Faults,
    state: SessionState,
    peers: BTreeMap<SpanId, Peer>,
    next_span: u64,
    /// The rows before the first layer.
    tokens: Vec<Row>,
    /// Rows that the last job left.
    kept: usize,
    pending: HashMap<u64, PendingJob>,
    now: Instant,
    done: usize,
    discarded: usize,
    replaced: usize,
    /// How often the session had to be begun again.
    restarts: usize,
    /// Jobs that got logits, and those that could not have states.
    with_logits: usize,
    without_states: usize,
}

fn run_of(values: &[f32]) -> Vec<Row> {
    values.as_chunks().0.to_vec()
}

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        let state = SessionState::new(0, [HIDDEN, VOCAB], Encoding::F32);
        let mut world = Self {
            random: Random(seed),
            faults,
            state,
            peers: BTreeMap::new(),
            next_span: 0,
            tokens: Vec::new(),
            kept: 0,
            pending: HashMap::new(),
            now: Instant::now(),
            done: 0,
            discarded: 0,
            replaced: 0,
            restarts: 0,
            with_logits: 0,
            without_states: 0,
        };
        world.form(LayerRange::new(0, LAYERS as u32).unwrap());
        world
    }

    fn key(&mut self) -> PushKey {
        let number = (self.random.below(1 << 30) as u128) << 64 | self.random.below(1 << 30) as u128;
        PushKey(number.to_le_bytes())
    }

    /// New spans for these layers, linked to those around them as a session does it.
    fn form(&mut self, layers: LayerRange) {
        let is_inside = |peer: &Peer| peer.layers.start() >= layers.start() && peer.layers.end() <= layers.end();
        self.peers.retain(|_, peer| !is_inside(peer));
        let at_end = |end: usize| self.peers.iter().find(|(_, peer)| peer.layers.end() == end).map(|(id, _)| *id);
        let at_start =
            |start: usize| self.peers.iter().find(|(_, peer)| peer.layers.start() == start).map(|(id, _)| *id);
        let (before, after) = (at_end(layers.start()), at_start(layers.end()));
        let mut bounds = vec![layers.start()];
        for layer in layers.start() + 1..layers.end() {
            if self.random.is(40) {
                bounds.push(layer);
            }
        }
        bounds.push(layers.end());
        let is_star = self.random.is(15);
        let mut keys: Vec<Option<PushKey>> = bounds.iter().map(|_| (!is_star).then(|| self.key())).collect();
        let returns_logits = layers.end() == LAYERS && self.random.is(self.faults.logits);
        if returns_logits {
            let last = keys.len() - 2;
            keys[last] = None;
        }
        let ids: Vec<SpanId> = keys[1..].iter().zip(self.next_span..).map(|(_, id)| SpanId(id)).collect();
        self.next_span += ids.len() as u64;
        let mut fed_by = keys[0].filter(|_| before.is_some());
        if let (Some(before), Some(key)) = (before, fed_by) {
            let accepts = self.peers[&before].accepts;
            let next = Some((ids[0], key));
            self.peers.get_mut(&before).unwrap().inbox.push_back(ToPeer::Route { accepts, next });
        }
        let mut new = Vec::new();
        for (index, id) in ids.iter().enumerate() {
            let layers = LayerRange::new(bounds[index] as u32, bounds[index + 1] as u32).unwrap();
            let rows_max = ROWS_MAX + self.random.below(3);
            let returns_logits = returns_logits && layers.end() == LAYERS;
            let wait_per_row = Duration::ZERO;
            new.push(NewSpan { id: *id, layers, rows_max, returns_logits, fed_by, wait: WAIT, wait_per_row });
            let following = ids.get(index + 1).copied().or(after);
            let next = following.zip(keys[index + 1]).filter(|_| !self.random.is(self.faults.unlinked));
            let peer = Peer {
                layers,
                returns_logits,
                rows: Vec::new(),
                accepts: keys[index].filter(|_| index > 0 || before.is_some()),
                next,
                is_silent: false,
                has_ended: false,
                inbox: VecDeque::new(),
                pushes: VecDeque::new(),
                outbox: VecDeque::new(),
            };
            self.peers.insert(*id, peer);
            fed_by = next.map(|(_, key)| key);
        }
        if let Some(after) = after {
            let (accepts, next) = (keys[ids.len()], self.peers[&after].next);
            self.peers.get_mut(&after).unwrap().inbox.push_back(ToPeer::Route { accepts, next });
        }
        self.state.replace(layers, new, fed_by.filter(|_| after.is_some()));
        self.act();
    }

    fn lose(&mut self, id: SpanId) {
        // It may have been replaced already.
        let Some(layers) = self.peers.get(&id).map(|peer| peer.layers) else { return };
        if !self.state.can_replay(layers.start()) {
            return self.restart();
        }
        self.replaced += 1;
        self.form(layers);
    }

    /// The session ends, and another one begins.
    fn restart(&mut self) {
        self.restarts += 1;
        self.state = SessionState::new(0, [HIDDEN, VOCAB], Encoding::F32);
        self.peers.clear();
        self.tokens.clear();
        self.kept = 0;
        self.pending.clear();
        self.form(LayerRange::new(0, LAYERS as u32).unwrap());
    }

    /// Carries out what the state wants.
    fn act(&mut self) {
        let (mut expected, mut lost) = (std::collections::HashSet::new(), Vec::new());
        let mut is_over = false;
        for action in self.state.take_actions() {
            match action {
                Action::Expect { from, run, .. } => {
                    assert!(self.peers.contains_key(&from), "{from:?} has left the chain");
                    expected.insert((from, run));
                }
                Action::Send { to, run } => {
                    assert!(expected.contains(&(to, run.run)), "a reply is expected");
                    assert!(run.activations.rows <= ROWS_MAX + 2);
                    self.peers.get_mut(&to).expect("it is in the chain").inbox.push_back(ToPeer::Run(run));
                }
                Action::Unfeed { before, span } => {
                    assert_eq!(self.peers[&before].layers.end(), self.peers[&span].layers.start());
                    let accepts = self.peers[&before].accepts;
                    let next = self.peers[&span].next;
                    self.peers.get_mut(&before).unwrap().inbox.push_back(ToPeer::Route { accepts, next: None });
                    self.peers.get_mut(&span).unwrap().inbox.push_back(ToPeer::Route { accepts: None, next });
                }
                Action::Done { job, output } => {
                    let job = self.pending.remove(&job).expect("a job is done once");
                    match output {
                        JobOutput::States(states) => assert_eq!(states, job.states),
                        JobOutput::Logits(found) => {
                            assert!(job.takes_logits);
                            assert_eq!(found, logits(run_of(&job.states)[0]));
                            self.with_logits += 1;
                        }
                        JobOutput::NoStates => {
                            assert!(!job.takes_logits && !job.states.is_empty());
                            self.without_states += 1;
                        }
                    }
                    self.done += 1;
                }
                Action::Discarded { job, state_rows } => {
                    let job = self.pending.remove(&job).expect("a job is discarded once");
                    assert!(job.end > self.kept, "it was not about rows that were discarded");
                    assert_eq!(state_rows * HIDDEN, job.states.len());
                    self.discarded += 1;
                }
                Action::Lost { span, .. } => lost.push(span),
                Action::Unreplayable => is_over = true,
            }
        }
        if is_over {
            return self.restart();
        }
        self.check_bounds();
        lost.into_iter().for_each(|span| self.lose(span));
    }

    fn described(&self) -> String {
        let span = |span: &Span| {
            let Span { new, sent, due, .. } = span;
            let known = self.state.rows_before(new.layers.start());
            format!("{} is fed: {}, {known} rows known, {sent} sent, due {due:?}", new.layers, span.is_fed())
        };
        let spans: Vec<String> = self.state.spans.iter().map(span).collect();
        format!("{}\n{:?}", spans.join("\n"), self.state.jobs)
    }

    fn check_bounds(&self) {
        let SessionState { spans, inputs, phases, jobs, .. } = &self.state;
        assert_eq!(spans.len(), self.peers.len());
        assert!(inputs.len() <= spans.len() && jobs.len() == self.pending.len());
        assert!(phases.len() == self.tokens.len());
        assert!(inputs.values().all(|rows| rows.len() <= self.tokens.len()));
        for span in spans {
            // A span that is not busy may get what several before it have sent.
            assert!(span.due.len() <= RUNS_DUE_MAX * LAYERS, "{} runs are due", span.due.len());
            assert!(span.sent <= self.tokens.len());
        }
    }

    /// The next step of the engine: rows after the last ones, or in place of some of them.
    fn add_job(&mut self) {
        let is_again = self.random.is(25) && !self.tokens.is_empty();
        let position = if is_again {
            self.tokens.len() - self.random.below(self.tokens.len().min(8)) - 1
        } else {
            self.tokens.len()
        };
        let rows = 1 + self.random.below(ROWS_MAX);
        if position + rows > TOKENS_MAX {
            return;
        }
        let row = |random: &mut Random| [random.below(50) as f32, random.below(50) as f32];
        let new: Vec<Row> = (0..rows).map(|_| row(&mut self.random)).collect();
        self.tokens.truncate(position);
        self.kept = position;
        self.tokens.extend_from_slice(&new);
        let state_rows = self.random.below(rows + 1);
        let all = computed(&self.tokens, 0..LAYERS);
        let states = all[all.len() - state_rows..].concat();
        let phase = if self.random.is(50) { Phase::Prefill } else { Phase::Decode };
        let takes_logits = state_rows == 1 && self.random.is(70);
        let run = self.state.add_job(position, phase, &new.concat(), state_rows, takes_logits);
        assert!(self.pending.insert(run, PendingJob { end: position + rows, states, takes_logits }).is_none());
        self.act();
    }

    /// A peer reads its next message.
    fn receive(&mut self, id: SpanId) {
        let peer = self.peers.get_mut(&id).unwrap();
        let takes_push = !peer.pushes.is_empty() && (peer.inbox.is_empty() || self.random.is(50));
        let (run, is_pushed) = match takes_push {
            true => {
                let (key, run) = peer.pushes.pop_front().unwrap();
                if peer.accepts != Some(key) {
                    return;
                }
                (run, true)
            }
            false => match peer.inbox.pop_front() {
                Some(ToPeer::Run(run)) => (run, false),
                Some(ToPeer::Route { accepts, next }) => {
                    (peer.accepts, peer.next) = (accepts, next);
                    return;
                }
                None => return,
            },
        };
        if peer.has_ended || peer.is_silent {
            return;
        }
        if run.position > peer.rows.len() {
            if !is_pushed {
                peer.has_ended = true;
                peer.outbox.push_back(FromPeer::Ended);
            }
            return;
        }
        peer.is_silent = self.random.is(self.faults.silent);
        peer.rows.truncate(run.position);
        peer.rows.extend(run_of(&run.activations.values));
        self.reply(id, run);
    }

    fn reply(&mut self, id: SpanId, run: Run) {
        let Faults { garbled, twice, unasked, overtaking, unlinked, dropped, .. } = self.faults;
        let is_last = self.peers[&id].layers.end() == LAYERS;
        let count = match (run.is_silent, is_last) {
            (true, _) => 0,
            (false, true) => run.state_rows,
            (false, false) => run.activations.rows,
        };
        let peer = self.peers.get_mut(&id).unwrap();
        let out = computed(&peer.rows, peer.layers.start()..peer.layers.end());
        let mut states = match peer.returns_logits {
            true if count > 0 => logits(out[out.len() - 1]).to_vec(),
            _ => out[out.len() - count..].concat(),
        };
        let mut passed_on = None;
        if let Some((next, key)) = peer.next.filter(|_| !run.is_silent) {
            let activations = Activations { encoding: Encoding::F32, rows: count, values: states.clone() };
            if self.random.is(unlinked) {
                peer.next = None;
            } else {
                passed_on = Some(key);
                if !self.random.is(dropped)
                    && let Some(next) = self.peers.get_mut(&next)
                {
                    next.pushes.push_back((key, Run { activations, ..run.clone() }));
                }
            }
        } else if !run.is_silent {
            peer.next = None;
        }
        if count > 0 && self.random.is(garbled) {
            match self.random.below(3) {
                0 => states[0] = f32::NAN,
                1 => states[0] = f32::INFINITY,
                _ => drop(states.pop()),
            }
        }
        let activations = Activations { encoding: Encoding::F32, rows: count, values: states };
        let (compute, queued) = (Duration::ZERO, Duration::ZERO);
        let returned = Returned { run: run.run, passed_on, compute, queued, states: activations };
        let peer = self.peers.get_mut(&id).unwrap();
        if self.random.is(unasked) {
            let run = self.random.below(1000) as u64 + 1_000_000;
            peer.outbox.push_back(FromPeer::Returned(Returned { run, ..returned.clone() }));
        }
        if self.random.is(twice) {
            peer.outbox.push_back(FromPeer::Returned(returned.clone()));
        }
        let at = if self.random.is(overtaking) { self.random.below(peer.outbox.len() + 1) } else { peer.outbox.len() };
        peer.outbox.insert(at, FromPeer::Returned(returned));
    }

    /// The client reads a message of a peer.
    fn hear(&mut self, id: SpanId) {
        match self.peers.get_mut(&id).unwrap().outbox.pop_front() {
            Some(FromPeer::Returned(returned)) => {
                self.state.returned(id, returned);
                self.act();
            }
            Some(FromPeer::Ended) => self.lose(id),
            None => {}
        }
    }

    /// Something that can happen does. Returns false if nothing can.
    fn step(&mut self) -> bool {
        let mut possible = Vec::new();
        for (id, peer) in &self.peers {
            if !peer.inbox.is_empty() || !peer.pushes.is_empty() {
                possible.push((*id, true));
            }
            if !peer.outbox.is_empty() {
                possible.push((*id, false));
            }
        }
        if possible.is_empty() {
            return false;
        }
        let (id, receives) = possible[self.random.below(possible.len())];
        if self.random.is(self.faults.lost) {
            self.lose(id);
        } else if receives {
            self.receive(id);
        } else {
            self.hear(id);
        }
        true
    }

    fn wait(&mut self) {
        self.now += 2 * WAIT;
        self.state.check_deadlines(self.now.max(Instant::now() + 2 * WAIT));
        self.act();
    }

    fn run(&mut self) {
        for _ in 0..EVENTS {
            if self.pending.len() < 4 && self.random.is(30) {
                self.add_job();
            }
            if self.random.is(self.faults.unkept) {
                self.state.drop_kept();
            }
            if !self.step() && self.random.is(50) {
                self.wait();
            }
        }
        // Now nothing goes wrong any more, so that everything ends.
        self.faults = Faults::default();
        let mut idle = 0;
        while !self.pending.is_empty() {
            match self.step() {
                true => idle = 0,
                false => {
                    self.wait();
                    idle += 1;
                    assert!(idle < PATIENCE, "nothing happens any more: {}", self.described());
                }
            }
        }
        while self.step() {}
        assert!(self.state.jobs.is_empty());
    }
}

pub const WAIT: Duration = Duration::from_secs(3);

/// Runs worlds with these faults, and returns how many jobs were done and discarded, how many spans replaced, how many jobs got
/// logits, and how many could not have states.
pub fn run_worlds(faults: Faults) -> [usize; 5] {
    let mut counts = [0; 5];
    for seed in 1..=150 {
        let run = std::panic::AssertUnwindSafe(|| {
            let mut world = World::new(seed, faults);
            world.run();
            let World { done, discarded, replaced, with_logits, without_states, restarts, .. } = world;
            assert!(faults.unkept > 0 || restarts == 0);
            [done, discarded, replaced, with_logits, without_states]
        });
        let Ok(run) = std::panic::catch_unwind(run) else { panic!("seed {seed} with {faults:?}") };
        (0..5).for_each(|index| counts[index] += run[index]);
    }
    println!("{faults:?}: {counts:?} jobs done, jobs discarded, spans replaced, logits, no states");
    counts
}
