"""The words of the presets, written for this project: questions for `chat` and `burst`, a system prompt, a
long text. Data only.
"""

from __future__ import annotations

CHAT = (
    "Why is the sky blue at noon and red in the evening? Explain it to a ten-year-old.",
    "Write a short poem about rain on a tin roof.",
    "Give me three tips for learning a new language in one hour a day.",
    "What is the difference between a virus and a bacterium?",
    (
        "I have eggs, rice, two carrots and half an onion. What can I cook in twenty minutes? List the steps "
        "in order."
    ),
    "Summarise the story of the tortoise and the hare in two sentences.",
    "Write a Python function that returns the n-th Fibonacci number, with a comment on each line.",
    "Name five rivers in Africa and one country that each of them crosses.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take? Show how you work it out.",
    "Write an email to my landlord, polite but firm: the heating in my flat has been off for three days, "
    "the evenings are cold, and I have called the office twice "
    "without an answer. Ask for a date by which it will be repaired, and mention that I can be at home on "
    "Tuesday and Thursday afternoon.",
    "What does the word 'serendipity' mean? Use it in a sentence.",
    "Explain how a bicycle stays upright when it moves.",
    "Suggest a name for a small bakery by the sea, and a slogan that fits on its door.",
    "Is it safe to look at a solar eclipse through ordinary sunglasses? Answer first, then give the reason.",
    "Describe a market in the early morning. Let the reader smell the bread, hear the carts on the stones, "
    "see the light change from grey to gold, and meet one person "
    "who has sold oranges at the same corner for forty years.",
    (
        "Turn this into a list of tasks: tomorrow I need to buy milk, call the dentist, finish the report "
        "and "
        "water the plants before I leave for the airport."
    ),
    "What is a prime number? Give the first ten.",
    "Translate 'Good morning, how are you today?' into French, Spanish and Italian.",
    "My friend says that we only use ten per cent of our brain. Is that true?",
    "Tell me a joke about a computer that is afraid of the dark.",
)

SYSTEM = (
    "You are the assistant of the Harbour Street Library. You answer questions of visitors in plain and "
    "friendly language, in at most four sentences. The library is open "
    "from Monday to Friday between nine in the morning and seven in the evening, on Saturday until four in "
    "the afternoon, and closed on Sunday. A card is free for "
    "everybody who lives in the town; visitors pay five coins for a month. Books may be kept for four "
    "weeks and renewed twice, unless somebody else waits for them; films "
    "and games may be kept for one week and can't be renewed. A late book costs one coin a week, never "
    "more than ten. There are eight desks with computers on the first "
    "floor, to be booked at the counter for an hour at a time, a reading room where nobody speaks, and a "
    "room for groups that must be reserved a day ahead. Children under "
    "twelve are welcome with an adult; story time is on Wednesday at four. Dogs stay outside, except guide "
    "dogs. If you don't know the answer, say so and point to the "
    "counter on the ground floor."
)
SYSTEM_QUESTIONS = (
    "When do you close on Saturday?",
    "How long may I keep a film?",
    "I am visiting for two weeks. What does a card cost me?",
    "Can I bring my dog?",
    "My book is six weeks late. What do I have to pay?",
    "Where can four of us work together and talk?",
    "Do you have a printer?",
    "My daughter is seven. Is there something for her this week?",
    "How do I get a computer for an hour?",
    "Can I renew a book that somebody else is waiting for?",
)

LONG = (
    "Read the following text and say in three sentences what it is about.\n\n"
    "For most of history, a sailor who lost sight of land knew how far north or south the ship was, but "
    "not how far east or west. The height of the sun at noon gives the "
    "first of these with nothing more than an angle and a table. The second needs a clock. The earth turns "
    "through fifteen degrees in an hour, so a ship that knows the "
    "hour at home, and sees that the sun stands highest at another hour where it is, can tell how many "
    "degrees lie between the two places. All that is needed is a clock "
    "that keeps the time of home through weeks of heat, cold, salt and storm.\n\n"
    "No such clock existed. The best of them swung a pendulum, and a pendulum on a rolling deck is "
    "worthless. A watch carried in the pocket lost or gained minutes in a "
    "day, and four minutes are a whole degree, which near the equator is more than a hundred kilometres. "
    "Ships ran on to rocks that their charts showed quite correctly, "
    "because their captains believed themselves elsewhere. After one such night, in which a fleet was lost "
    "within sight of its own coast, a prize was offered for a method "
    "that would find the place of a ship to within half a degree.\n\n"
    "The learned looked to the sky. The moon moves against the stars like the hand of a great clock, and "
    "if its path could be written down years ahead, anybody who could "
    "measure an angle could read the time from it. The method works, but it asks for a clear night, a "
    "steady hand and hours of arithmetic. A carpenter who had taught "
    "himself to build clocks took the other way. He made wheels of a wood that needs no oil, joined two "
    "metals so that one took back what the other gave as the weather "
    "changed, and replaced the pendulum with a pair of balances that swung against each other. His first "
    "sea clock weighed as much as a man. His fourth, made after thirty "
    "years of work, lay in the hand like a large watch, and on a voyage of eighty-one days it was wrong by "
    "five seconds.\n\n"
    "He had to wait long for his reward, for the judges preferred the moon, and changed the rules more "
    "than once. But within two generations every ship that could afford "
    "it carried two or three such clocks, and the moon was left to the poets."
)
