//! Failures that people who build and run such systems have reported, each as a test named by its case: groups A
//! (streams), B (translation), C (capture of tokens) and G (operation). And what the real program's store survives.

#[path = "../common/mock.rs"]
mod mock;
#[path = "../common/setup.rs"]
mod setup;
#[path = "../common/speech.rs"]
mod speech;

mod group_a;
mod group_a_broken;
mod group_a_calls;
mod group_b;
mod group_b_replies;
mod group_c;
mod group_c_routing;
mod group_c_turns;
mod group_g;
mod group_g_limits;
mod group_g_listen;
mod group_g_wire;
mod process;
mod store_durable;
mod store_killed;
mod store_room;
mod support;
