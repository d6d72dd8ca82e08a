"""This file is a text of about a thousand tokens: prose, a recipe, a dialogue, code, figures."""

TEXT = """\
The lighthouse at the end of the bay had not been lit for thirty years when Marta bought it. The \
agent had shown her the kitchen first, which was sensible, because the kitchen had a stove and a \
window to the south, and only then the stairs. There were one hundred and twelve steps. She \
counted them twice, once going up with her hand on the cold rail and once coming down, and both \
times she arrived at the same number, which pleased her more than it should have. "Nobody has \
asked about the lamp in all this time," the agent said. "People want the view." Marta did not \
want the view. She wanted to know whether the clockwork that had turned the lens could be made to \
turn again, and whether a person who had repaired watches for half her life could learn to repair \
something that weighed two tonnes.

It took her the whole of the first winter to take the mechanism apart. She drew each wheel before \
she removed it, gave it a number, and laid it on a sheet of newspaper on the floor of the second \
room. By February the floor was full. The weights that had driven the clock hung in the middle of \
the tower on a chain, and in the old days the keeper had wound them up every four hours, day and \
night, for as long as the fog lasted. There was a book in which he had written down each winding. \
In the autumn of 1931 the fog had lasted for nine days. On the eighth day he had written only: \
"Still here."

Soup for six people. You will need: 1 kg of pumpkin, 2 onions, 3 cloves of garlic, a piece of \
ginger as long as your thumb, 40 g of butter, 1 litre of vegetable stock, 200 ml of cream, salt, \
pepper and a little nutmeg.
1. Cut the pumpkin into cubes of about 2 cm and chop the onions, the garlic and the ginger.
2. Melt the butter in a large pot and cook the onions slowly until they are soft, about 8 \
minutes. They should not turn brown.
3. Add the garlic, the ginger and the pumpkin, stir well, and pour in the stock.
4. Let it simmer for 25 minutes with the lid on, then blend it until it is smooth.
5. Stir in the cream, season it, and serve it with bread.

"What does a compiler do?" asked the boy.
"It reads what you wrote," said his aunt, "and writes it again for somebody who is less patient \
than you are."
"Is the computer impatient?"
"No. It has no patience at all, neither too little nor too much. It does the first thing, then \
the second thing, then the third, and if the second thing makes no sense it does it anyway. That \
is why the compiler complains before the computer gets to see it."
He thought about that. "So it is like a teacher who reads my letter before the post takes it."
"A strict one, yes."

def average(values: list[float]) -> float:
    \"\"\"The arithmetic mean. Raises ValueError if there are no values.\"\"\"
    if not values:
        raise ValueError("no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


print(average([1.5, 2.5, 4.0]))

The river has its source at a height of 1,840 metres, runs 214 km to the north-west, and reaches \
the sea near the old harbour. Its basin covers 9,300 square kilometres, of which roughly a third \
is forest. The average discharge at the mouth is 126 cubic metres a second; in the flood of March \
1988 it was estimated at more than 2,000. Since then three reservoirs have been built in the \
upper valley. They hold back water in spring, when the snow melts, and give it back in summer, \
when the farmers between the two towns need it most. Engineers argue about whether a fourth one \
would help: it would cost about 85 million euros, and the place where it could be built is home \
to a rare kind of salamander that lives nowhere else.

Dear Mr Okafor, thank you for your letter of 3 May. We are sorry to hear that the bicycle arrived \
with a bent front wheel. A new wheel will leave our workshop on Thursday and should reach you \
before the weekend; you do not need to send the old one back. If you would rather have a mechanic \
fit it, please take it to any shop near you and send us the bill, up to 40 euros. We have also \
looked into how this could happen. The box was strong enough, but the foam inside had been cut \
too short, and the wheel touched the side. That has been changed. Yours sincerely, Ines Duarte, \
Customer Service.
"""
