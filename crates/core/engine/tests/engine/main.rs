//! The engine and its executors, on small models and on a fake executor. One program, because each compiles the executor anew.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod absent_layers;
mod invariance;
mod layer_parts;
mod local;
mod loss;
mod loss_in_flight;
mod prefix;
mod request_options;
mod requests;
mod sampler;
mod scheduling;
mod service;
mod stages;
